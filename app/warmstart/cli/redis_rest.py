"""redis-rest: the Upstash-REST endpoint in front of a Redis."""

from __future__ import annotations

import os
from pathlib import Path

import click

from warmstart import logs
from warmstart.errors import ConfigError


@click.command()
@click.option("--host", envvar="HOST", default="127.0.0.1", show_default=True, help="Address to listen on; HOST.")
@click.option("--port", envvar="PORT", type=click.IntRange(1, 65535), default=8079, show_default=True, help="PORT.")
def redis_rest(host: str, port: int) -> None:
    """Serve Upstash REST in front of a Redis.

    The Redis is that of REDIS_URL; the bearer token is UPSTASH_REDIS_REST_TOKEN. Both are also read from the files that
    REDIS_URL_FILE and UPSTASH_REDIS_REST_TOKEN_FILE name.
    """
    from warmstart.redis_rest import run

    faults: list[str] = []
    url, token = (_secret(name, faults) for name in ("REDIS_URL", "UPSTASH_REDIS_REST_TOKEN"))
    if faults:
        raise ConfigError(faults)
    logs.configure(os.environ.get("LOG_LEVEL", "").lower() or "info", secrets=[url, token])
    run(host, port, url, token)


def _secret(name: str, faults: list[str]) -> str:
    if path := os.environ.get(f"{name}_FILE"):
        try:
            return Path(path).read_text().strip()
        except OSError as error:
            faults.append(f"{name}_FILE: {path} can't be read ({error.strerror})")
            return ""
    value = os.environ.get(name, "")
    if not value:
        faults.append(f"{name} must be set, or {name}_FILE")
    return value
