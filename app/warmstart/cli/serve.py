"""serve: the API, and the worker beside it, in one process."""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from warmstart import __version__, logs
from warmstart.allocation import limit_allocators
from warmstart.cli import announce
from warmstart.config import SECRETS, Settings, load
from warmstart.errors import BookkeepingUnavailable
from warmstart.home import FIRST_TENANT, Holder, Home, ServerInfo, StartRefused, refuse_root

if TYPE_CHECKING:
    from warmstart.runtime import Runtime
    from warmstart.store.bookkeeping import Bookkeeping

#: How long requests under way may take to end after the signal to stop.
GRACE_S: Final = 10
KEEPALIVE_S: Final = 65
SECOND_SIGNAL_S: Final = 1.0
#: For a first connection to Postgres on a machine that is busy.
FIRST_START_S: Final = 30.0
BACKLOG: Final = 2048
FIRST_KEY: Final = "first"


@click.command()
@click.option("--host", help="Address to listen on; HOST, or 127.0.0.1.")
@click.option("--port", type=int, help="Port to listen on, 0 for any free one; PORT, or 8484.")
@click.option("--no-worker", is_flag=True, help="Only the API; run `warmstart worker` beside it.")
@click.option("--idle-exit", type=click.FloatRange(min=0.1), metavar="SECONDS", help="End when unused for so long.")
@click.option("--allow-root", is_flag=True, envvar="WARMSTART_ALLOW_ROOT", help="Run as root all the same.")
@click.option("--background", is_flag=True, hidden=True, help="As clients start it: says nothing, logs to files.")
def serve(
    host: str | None, port: int | None, no_worker: bool, idle_exit: float | None, allow_root: bool, background: bool
) -> None:
    """Run the memory: the API, MCP and the worker.

    REST is at /v1, MCP at /mcp.

    With DATABASE_URL set, the worker is a process of its own: `warmstart worker`.
    """
    limit_allocators()
    settings = load(host=host, port=port)
    refuse_root(allow_root)
    home = Home(settings.warmstart_home)
    home.check_version()
    embedded = is_embedded(settings)
    if embedded and (holder := home.holder()):
        raise home.in_use(holder)
    with _listen(settings.host, settings.port) as listener:
        url = _url(settings.host, listener.getsockname()[1])
        # with a database of one's own nothing in the home is one process's alone: a roll-out runs two
        with home.lock(Holder(os.getpid(), url)) if embedded else nullcontext():
            configure_logs(settings, home if background else None)
            options = Options(url, embedded, embedded and not no_worker, idle_exit, background)
            asyncio.run(Service(settings, home, listener, options).run())


def is_embedded(settings: Settings) -> bool:
    """Postgres is the home's own, so one process at a time runs on the home."""
    return not settings.database_url.get_secret_value()


def configure_logs(settings: Settings, files_of: Home | None = None) -> None:
    if files_of is not None:
        logs.configure_client(settings.log_level, "server", files_of.logs)
        return
    values = [getattr(settings, name).get_secret_value() for name in SECRETS]
    logs.configure(settings.log_level, settings.log_format, secrets=[v for v in values if v])


@dataclass(frozen=True)
class Options:
    url: str
    embedded: bool
    worker: bool
    idle_exit_s: float | None
    background: bool


class Service:
    """One server from its first part to its last. The first signal ends it in order, a second one faster."""

    def __init__(self, settings: Settings, home: Home, listener: socket.socket, options: Options) -> None:
        self._settings, self._home, self._listener, self._options = settings, home, listener, options
        self._server: Any = None
        self._starting: asyncio.Task[Any] | None = None
        self._stopped_at = float("inf")

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._starting = asyncio.current_task()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` means it
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, self.stop)
        try:
            await self._run()
        except asyncio.CancelledError:
            if self._starting is not None:
                raise
            # a signal while the parts were opened: all of them are closed by now

    def stop(self) -> None:
        now = time.monotonic()
        if self._server is not None:
            # a supervisor and its process group may send one signal twice
            self._server.force_exit = now - self._stopped_at >= SECOND_SIGNAL_S
            self._stopped_at = min(now, self._stopped_at)
            self._server.should_exit = True
        elif self._starting is not None:
            self._starting.cancel()
            self._starting = None  # a second signal must not break the closing off

    async def _run(self) -> None:
        # here, since a refused start need not wait for these
        from warmstart.runtime import open_runtime

        async with AsyncExitStack() as stack:
            # half a second of imports, while Postgres and the model, processes of their own, start
            importing = asyncio.create_task(asyncio.to_thread(importlib.import_module, "warmstart.mcp_server"))
            stack.push_async_callback(asyncio.wait, {importing})
            runtime = await stack.enter_async_context(open_runtime(self._settings))
            first = await self._admit(runtime)
            await importing
            from warmstart.web.app import create_app

            app = LastUse(create_app(lambda: nullcontext(runtime)))
            server = _server(app, lambda: self._started(first), lambda: self._stopping(first))
            if self._options.worker:
                await stack.enter_async_context(_worker(runtime, server))
            if self._options.idle_exit_s:
                await stack.enter_async_context(_background(_idle_exit(app, self._options.idle_exit_s, self.stop)))
            self._server = server
            await server.serve(sockets=[self._listener])
            if not server.started or server.failed:
                raise StartRefused("the server ended by itself: its log says why")

    async def _admit(self, runtime: Runtime) -> First | None:
        """The first tenant and key of a new home, and the key of this account's own programs."""
        if not self._options.embedded:
            return None
        deadline = time.monotonic() + FIRST_START_S
        while True:
            try:
                first = await first_start(runtime.bookkeeping, with_key=not self._options.background)
                break
            except BookkeepingUnavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
        runtime.keys.admit(first.local_key, first.user_id)
        return first

    def _started(self, first: First | None) -> None:
        url = self._options.url
        if first is None:
            announce.plain(url)
            return
        at = datetime.now(UTC).isoformat(timespec="seconds")
        self._home.publish(ServerInfo(url, os.getpid(), __version__, at, first.local_key))
        if self._options.background:
            _let_go_of_terminal()
        else:
            announce.ready(url, first.api_key, self._home)

    def _stopping(self, first: First | None) -> None:
        if first is not None:
            self._home.withdraw()  # before requests under way end, so that no client comes any more


@dataclass(frozen=True)
class First:
    user_id: str
    #: Only where it was made at this start.
    api_key: str | None
    local_key: str


async def first_start(bookkeeping: Bookkeeping, *, with_key: bool) -> First:
    """Makes the first tenant, and its first key where somebody is there to read it."""
    tenants = await bookkeeping.tenants()
    named = [t.id for t in tenants if t.name == FIRST_TENANT] or [t.id for t in tenants]
    user_id = named[0] if named else await bookkeeping.create_tenant(FIRST_TENANT)
    api_key = None
    if with_key and not await bookkeeping.list_keys():
        api_key = await bookkeeping.create_key(user_id, FIRST_KEY)
    return First(user_id, api_key, f"ws_sk_{secrets.token_urlsafe(32)}")


class LastUse:
    """Knows for how long nobody with a key has been here."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self._at = time.monotonic()
        self._serving = 0

    @property
    def idle_s(self) -> float:
        return 0.0 if self._serving else time.monotonic() - self._at

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        self._serving += scope["type"] == "http"
        try:
            await self.app(scope, receive, send)
        finally:
            self._serving -= scope["type"] == "http"
            if scope.get("user") is not None:
                self._at = time.monotonic()


async def _idle_exit(app: LastUse, seconds: float, stop: Callable[[], None]) -> None:
    while True:
        left = seconds - app.idle_s
        if left <= 0:
            return stop()
        await asyncio.sleep(left)


@asynccontextmanager
async def _background(work: Any) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


@asynccontextmanager
async def _worker(runtime: Runtime, server: Any) -> AsyncIterator[None]:
    """The worker; an API whose worker died ends too, so that whoever started it sees."""
    from warmstart.worker import Worker

    def ended(task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            import structlog

            structlog.get_logger(__name__).critical("worker.died", exc_info=task.exception())
            server.failed = server.should_exit = True

    async with _background(Worker(runtime).run()) as task:
        task.add_done_callback(ended)
        yield


def _server(app: LastUse, started: Callable[[], None], stopping: Callable[[], None]) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        failed = False

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # `Service` has them, from before the first part is opened until the last is closed

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            if not self.should_exit:
                started()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            stopping()
            await super().shutdown(sockets=sockets)
            if self.force_exit:
                await self.lifespan.shutdown()  # uvicorn would leave the application open

    config = uvicorn.Config(
        app, lifespan="on", log_config=None, access_log=False, proxy_headers=False, server_header=False,
        timeout_keep_alive=KEEPALIVE_S, timeout_graceful_shutdown=GRACE_S, ws="none",
    )  # fmt: skip
    return Server(config)


def _listen(host: str, port: int) -> socket.socket:
    """Bound before anything else starts: a busy port costs nothing, and a free one can't be lost later."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartRefused(f"HOST {host!r} is no address of this machine ({error.strerror}): 127.0.0.1 is") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        other = "choose another with --port or PORT, such as 8485; 0 takes any free one"
        raise StartRefused(f"can't listen on port {port} of {host} ({error.strerror}): {other}") from None
    return listener


def _url(host: str, port: int) -> str:
    """As programs of this machine reach it."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"http://{name}:{port}"


def _let_go_of_terminal() -> None:
    """What was written while starting is for the client that waited; from now on there are log files."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.close(nothing)
