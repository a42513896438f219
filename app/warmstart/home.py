"""The home directory of one memory: who runs on it, and how a client finds that server or starts one.

    home/
      version       the layout of this directory, and who wrote it
      server.lock   held while a process runs on the home; names that process
      server.json   0600; the running server's URL and a key for this account, while it serves
      start.lock    held by the client that starts a server
      logs/         of servers that clients started
      lancedb/  postgres/  keys.json

Standard library only: clients start fast.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from warmstart import __version__
from warmstart.errors import ConfigError, ServerUnreachable, WarmstartError
from warmstart.paths import default_home

if TYPE_CHECKING:
    import subprocess

#: Counts up when an older version could no longer use the directory.
#: Made on the first start, or with the first key.
FIRST_TENANT: Final = "default"
FORMAT: Final = 1
#: A server that a client started ends this long after its last request.
IDLE_EXIT_S: Final = 600.0
#: Crash recovery of Postgres and the loading of the model included.
START_TIMEOUT_S: Final = 90.0
POLL_S: Final = 0.05
#: Others look at the lock by taking it for a moment.
LOCK_PATIENCE_S: Final = 1.0
SHOWN_LOG_LINES: Final = 5
MAX_FILE_BYTES: Final = 65_536
#: Variables by which other programs name their own databases and providers: a server that a client
#: starts from somebody's editor must not write into those, so it never sees them.
NOT_PASSED_ON: Final = (
    "DATABASE_URL", "DATABASE_URL_FILE", "LANCEDB_URI",
    "UPSTASH_REDIS_REST_URL", "UPSTASH_REDIS_REST_TOKEN", "UPSTASH_REDIS_REST_TOKEN_FILE",
    "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_API_KEY_FILE",
    "HOST", "PORT", "LOG_LEVEL", "LOG_FORMAT", "ALLOWED_HOSTS", "TRUSTED_PROXIES",
    "WARMSTART_URL", "WARMSTART_API_KEY",
)  # fmt: skip


class StartRefused(WarmstartError):
    """A start that was refused before anything was touched; the line has the way out."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that runs on a home."""

    pid: int
    #: Empty where it serves nothing.
    url: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid}, {self.url}" if self.url else f"pid {self.pid}"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a running server tells programs of its own account."""

    url: str
    pid: int
    version: str
    started_at: str
    api_key: str = field(repr=False)


class Target(NamedTuple):
    """Where a client's requests go."""

    url: str
    api_key: str
    #: The server is this home's own, so it may end and come back elsewhere.
    local: bool


class Home:
    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.logs = self.path / "logs"
        self._lock = self.path / "server.lock"
        self._info = self.path / "server.json"
        self._version = self.path / "version"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Home:
        named = (os.environ if environ is None else environ).get("WARMSTART_HOME")
        return cls(Path(named) if named else default_home())

    # -- its version

    def check_version(self) -> None:
        """Raises StartRefused for a home that this version can't use; touches nothing."""
        try:
            found = _read_json(self._version)
        except FileNotFoundError:
            return
        except (OSError, ValueError):
            found = {}
        layout, writer = found.get("format"), found.get("written_by", "an unknown version")
        if not isinstance(layout, int):
            raise StartRefused(
                f"{self._version} can't be read, so it is not known whether this version may use the home: "
                "restore that file, or start with another WARMSTART_HOME"
            )
        if layout > FORMAT:
            raise StartRefused(
                f"the home {self.path} was written by a newer Warmstart ({writer}; this is {__version__}): "
                "upgrade, or start with another WARMSTART_HOME"
            )

    def _write_version(self) -> None:
        if not self._version.exists():
            _write_private(self._version, {"format": FORMAT, "written_by": __version__})

    # -- who runs on it

    def holder(self) -> Holder | None:
        """The process that holds the home now; creates nothing."""
        try:
            fd = os.open(self._lock, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _as_holder(os.pread(fd, MAX_FILE_BYTES, 0))
        finally:
            os.close(fd)
        return None

    @contextlib.contextmanager
    def lock(self, holder: Holder, patience_s: float = LOCK_PATIENCE_S) -> Iterator[None]:
        """Holds the home; raises StartRefused where another process goes on holding it."""
        self.check_version()
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + patience_s
            while not _try_lock(fd):
                if time.monotonic() > deadline:
                    raise self.in_use(_as_holder(os.pread(fd, MAX_FILE_BYTES, 0)))
                time.sleep(POLL_S)
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(asdict(holder)).encode(), 0)
            self._info.unlink(missing_ok=True)  # a killed server's
            self._write_version()
            yield
        finally:
            os.close(fd)

    def in_use(self, holder: Holder) -> StartRefused:
        return StartRefused(
            f"the home {self.path} is in use by another Warmstart ({holder}): "
            "use that one, stop it, or start with another WARMSTART_HOME"
        )

    # -- its server, for clients

    def publish(self, info: ServerInfo) -> None:
        _write_private(self._info, asdict(info))

    def withdraw(self) -> None:
        self._info.unlink(missing_ok=True)

    def server(self) -> ServerInfo | None:
        """The server that serves this home now; what a dead one left behind does not count."""
        try:
            info = ServerInfo(**_read_json(self._info))
        except (OSError, ValueError, TypeError):
            return None
        holder = self.holder()
        return info if holder is not None and holder.pid == info.pid else None

    def attach(self, timeout_s: float = START_TIMEOUT_S) -> ServerInfo:
        """The home's server; one is started where none runs. However many ask at once: they get one.

        Raises ServerUnreachable with the server's own words, or StartRefused.
        """
        if info := self.server():
            return info
        self.check_version()
        _need_server_package()
        deadline = time.monotonic() + timeout_s
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _exclusive(self.path / "start.lock", deadline):
            return self._start_and_wait(deadline)

    def _start_and_wait(self, deadline: float) -> ServerInfo:
        child: subprocess.Popen[bytes] | None = None
        while True:
            if info := self.server():
                return info
            if child is not None and child.poll() is not None:
                # it may have lost a race for the home to somebody's `warmstart serve`
                if self.holder() is None:
                    raise ServerUnreachable(f"the memory's server did not start: {self._last_words()}")
                child = None
            if child is None and self.holder() is None:
                child = self._spawn()
            if time.monotonic() > deadline:
                state = "did not get ready in time" if child else f"({self.holder()}) does not get ready"
                raise ServerUnreachable(f"the memory's server {state}: {self._last_words()}")
            time.sleep(POLL_S)

    def _spawn(self) -> subprocess.Popen[bytes]:
        import subprocess

        self.logs.mkdir(exist_ok=True, mode=0o700)
        # -P, and a directory of ours: modules of the project that a client runs in are not imported
        command = [sys.executable, "-P", "-m", "warmstart.cli", "serve", "--background"]
        command += ["--idle-exit", f"{IDLE_EXIT_S:g}", "--host", "127.0.0.1", "--port", "0"]
        environ = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        environ["WARMSTART_HOME"] = str(self.path)
        with (self.logs / "start.log").open("wb") as log:
            child = subprocess.Popen(
                command, cwd=self.path, env=environ, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        # reaps it: a client that lives long would keep a zombie
        threading.Thread(target=child.wait, daemon=True).start()
        return child

    def _last_words(self) -> str:
        path = self.logs / "start.log"
        try:
            lines = path.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        said = " | ".join(line.removeprefix("Error: ") for line in lines[-SHOWN_LOG_LINES:])
        return f"{said} (see {self.logs})" if said else f"it said nothing (see {self.logs})"


def connect(environ: Mapping[str, str] | None = None, home: Home | None = None) -> Target:
    """Where a client finds its memory: WARMSTART_URL, or the home's server, started if need be."""
    env = os.environ if environ is None else environ
    url, api_key = env.get("WARMSTART_URL", "").strip(), env.get("WARMSTART_API_KEY", "").strip()
    if url:
        if not api_key:
            raise ConfigError([
                "WARMSTART_URL is set, but WARMSTART_API_KEY is not: set it to a key of that server "
                "(`warmstart keys create` there makes one), or unset WARMSTART_URL to use this machine's own memory"
            ])  # fmt: skip
        return Target(url, api_key, local=False)
    info = (home or Home.from_environ(env)).attach()
    return Target(info.url, api_key or info.api_key, local=True)


def refuse_root(allowed: bool) -> None:
    if os.geteuid() == 0 and not allowed:
        raise StartRefused(
            "running as root is refused, since all it needs is a normal user's rights: "
            "start it as another user, or say --allow-root (WARMSTART_ALLOW_ROOT=True) where root is what you have"
        )


def _need_server_package() -> None:
    import importlib.util

    if importlib.util.find_spec("lancedb") is None:
        raise ConfigError([
            "no memory to use: WARMSTART_URL is not set, and the server is not installed here: "
            "set WARMSTART_URL and WARMSTART_API_KEY, or install warmstart[server,local]"
        ])  # fmt: skip


@contextlib.contextmanager
def _exclusive(path: Path, deadline: float) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not _try_lock(fd):
            if time.monotonic() > deadline:
                raise ServerUnreachable(f"another client holds {path} and does not go on: end it, then try again")
            time.sleep(POLL_S)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _as_holder(content: bytes) -> Holder:
    try:
        return Holder(**json.loads(content))
    except (ValueError, TypeError):
        return Holder(0)  # it took the lock this moment


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        found = json.loads(file.read(MAX_FILE_BYTES))
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def _write_private(path: Path, content: dict[str, Any]) -> None:
    """By rename, so that a reader sees all of it or none."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
