"""worker: what nobody waits for, in a process of its own."""

from __future__ import annotations

import asyncio
import signal

import click
from pydantic import SecretStr

from warmstart.allocation import limit_allocators, limit_read_ahead
from warmstart.cli.serve import configure_logs, is_embedded
from warmstart.config import Settings, load
from warmstart.home import refuse_root


@click.command()
@click.option("--retry-failed", is_flag=True, help="Queue again what was given up, and end.")
@click.option("--allow-root", is_flag=True, envvar="WARMSTART_ALLOW_ROOT", help="Run as root all the same.")
def worker(retry_failed: bool, allow_root: bool) -> None:
    """Embed what is queued, empty the trash, compact.

    `warmstart serve` does this itself, unless DATABASE_URL is set or it was given --no-worker.
    With DATABASE_URL it answers /healthz and /metrics on HOST and PORT.
    """
    limit_allocators()
    limit_read_ahead()
    settings = load()
    refuse_root(allow_root)
    configure_logs(settings)
    asyncio.run(_until_signal(settings, retry_failed=retry_failed, allow_root=allow_root))


async def _until_signal(settings: Settings, *, retry_failed: bool, allow_root: bool) -> None:
    work = asyncio.create_task(_work(settings, retry_failed=retry_failed, allow_root=allow_root))
    stopped = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
    if not work.cancelled():
        work.result()


async def _work(settings: Settings, *, retry_failed: bool, allow_root: bool) -> None:
    import uvicorn

    from warmstart.cli.database import database
    from warmstart.runtime import open_runtime
    from warmstart.web.probe import create_probe_app
    from warmstart.worker import Worker

    async with database(settings, allow_root=allow_root) as dsn:
        named = settings.model_copy(update={"database_url": SecretStr(dsn)})
        async with open_runtime(named) as runtime:
            if retry_failed:
                click.echo(f"{await Worker(runtime).retry_failed()} memories queued again")
                return
            worker = Worker(runtime)
            if is_embedded(settings):
                await worker.run()
                return
            app = create_probe_app(runtime.metrics, lambda: worker.is_alive)
            config = uvicorn.Config(app, settings.host, settings.port, log_config=None, access_log=False)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(worker.run())
                # `_serve` and not `serve`, which would take the signals for itself
                tasks.create_task(uvicorn.Server(config)._serve())
