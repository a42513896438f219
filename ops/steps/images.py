"""The images of the release on the VM: pulled by digest and built there, or carried from this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.operations import python

from ops import images, program
from ops.carry import MB, carry
from ops.facts import remote
from ops.images import APP, Engine, ImageError, ImageRef, Local
from ops.release import Release
from ops.runner import Deploy, Refused

ENGINE: Final = """: images on the machine
command -v docker >/dev/null || exit 0
docker version --format '{{.Server.Arch}}' && docker info --format '{{json .DriverStatus}}' || exit 1
docker image ls --quiet --no-trunc | sort -u | xargs -r docker image inspect --format '{{json .}}'
"""
CONTAINERD: Final = "io.containerd.snapshotter"
#: For archives of images on their way; git knows nothing of it.
SCRATCH: Final = ".cache/ops"


def apply(deploy: Deploy) -> None:
    engine = there()
    deploy.release = deploy.release or Release()
    try:
        if deploy.target.images == "carry":
            _carried(deploy, engine)
        else:
            _pulled(deploy, engine)
    except ImageError as error:
        raise Refused([str(error)]) from None


def there() -> Engine:
    """The images of the VM; none where it has no Docker yet."""
    found = remote(ENGINE)
    if not found.ok:
        raise Refused([f"Docker on the VM does not answer: {found.last_error}"])
    lines = found.out.splitlines()
    if len(lines) < 2:
        return Engine([])
    return Engine([json.loads(line) for line in lines[2:]], lines[0].strip(), CONTAINERD in lines[1])


# -- carried


def _carried(deploy: Deploy, engine: Engine) -> None:
    found, unknown = images.here(deploy.target, deploy.source, engine, dry=deploy.dry, say=deploy.say)
    lacking = [image for image in found if not _is_there(image, engine)]
    for image in found:
        on_vm = engine.find(image.name)
        deploy.release.images[image.component] = ImageRef(
            image.name, str(on_vm["Id"]) if on_vm and image not in lacking else ""
        )
    for component in unknown:
        deploy.release.images[component] = ImageRef("", "")
    if lacking or unknown:
        size = sum(image.image.get("Size", 0) for image in lacking) / MB
        names = ", ".join([*(image.component for image in lacking), *unknown])
        python.call(
            name=f"Carry images: {names} ({size:.0f} MB, less the layers that are there)",
            function=_carry, deploy=deploy, lacking=lacking, engine=engine,
        )  # fmt: skip


def _is_there(image: Local, engine: Engine) -> bool:
    found = engine.find(image.name)
    return found is not None and images.fingerprint(found) == image.fingerprint


def _carry(state: State, host: Host, deploy: Deploy, lacking: Sequence[Local], engine: Engine) -> bool:
    try:
        carry(deploy.target, lacking, engine.has(), deploy.source.root / SCRATCH, deploy.say)
        after = there()
        wrong = [image.name for image in lacking if not _is_there(image, after)]
        if wrong:
            remote(f"docker image rm {' '.join(wrong)}")
            raise ImageError(f"on the VM {', '.join(wrong)} is not what it is here; it was removed there: deploy again")
    except (ImageError, Refused) as error:
        logger.error(str(error))
        return False
    _note_ids(deploy, after)
    return True


# -- pulled, and built there


def _pulled(deploy: Deploy, engine: Engine) -> None:
    pins = images.pins(deploy.source.root)
    for component in images.components(deploy.target):
        name = images.app_name(deploy.source) if component == APP else pins[component]
        found = engine.find(name)
        deploy.release.images[component] = ImageRef(name, str(found["Id"]) if found else "")
        if not found and component == APP:
            python.call(name=f"Build {name}", function=_build, deploy=deploy, name_=name)
        elif not found:
            python.call(name=f"Pull {name}", function=_pull, deploy=deploy, name_=name)


def _pull(state: State, host: Host, deploy: Deploy, name_: str) -> bool:
    done = program.run(state, host, deploy, "docker", "pull", "--quiet", name_, timeout_s=images.PULL_TIMEOUT_S)
    return done and _arrived(deploy, name_)


def _build(state: State, host: Host, deploy: Deploy, name_: str) -> bool:
    build = ("docker", "build", "--progress", "plain", "--file", "app/Dockerfile", "--tag", name_, "-")
    done = program.run(
        state, host, deploy, "env", "DOCKER_BUILDKIT=1", *build,
        stdin=deploy.source.archive(*images.APP_SOURCES), timeout_s=images.BUILD_TIMEOUT_S,
    )  # fmt: skip
    return done and _arrived(deploy, name_)


def _arrived(deploy: Deploy, name: str) -> bool:
    engine = there()
    if engine.find(name) is None:
        logger.error(f"{name} is not on the VM although that is what it was told")
        return False
    _note_ids(deploy, engine)
    return True


def _note_ids(deploy: Deploy, engine: Engine) -> None:
    for component, ref in deploy.release.images.items():
        if found := engine.find(ref.name):
            deploy.release.images[component] = ImageRef(ref.name, str(found["Id"]))
