"""A real redis-server on a free loopback port, in a folder of its own, stopped by its pid."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

#: What the endpoint's user may do in production too: all but what harms the server.
CONFIG = """
bind 127.0.0.1
port {port}
dir {folder}
save ""
appendonly no
maxmemory 64mb
busy-reply-threshold 200
user rest on >a-password ~* &* +@all -@admin -@dangerous -@blocking
"""


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


class RedisServer:
    """`url` is the bounded user's, `admin_url` the server's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        port = free_port()
        self.url = f"redis://rest:a-password@127.0.0.1:{port}/0"
        self.admin_url = f"redis://127.0.0.1:{port}/0"
        self._port = port
        (folder / "redis.conf").write_text(CONFIG.format(port=port, folder=folder))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise RuntimeError("redis-server is not installed; on Debian: apt-get install redis-server")
        with (self._folder / "redis.log").open("ab") as out:
            self._process = subprocess.Popen([binary, self._folder / "redis.conf"], stdout=out, stderr=out)
        wait_for_port(self._port, self._process, self._folder / "redis.log")

    def stop(self) -> None:
        """At once, as a kill -9 would."""
        if self._process:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def freeze(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process
        self._process.send_signal(signal.SIGCONT)


def wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}:\n{log.read_text()[-2_000:]}")
        try:
            socket.create_connection(("127.0.0.1", port), 0.2).close()
            return
        except OSError:
            time.sleep(0.02)
    process.kill()
    raise RuntimeError(f"nothing listens on its port after {timeout_s} s:\n{log.read_text()[-2_000:]}")
