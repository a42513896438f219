"""The program on the VM, and others there that take a while: their lines are handed on as they come."""

from __future__ import annotations

import subprocess
from collections import deque
from collections.abc import Callable
from threading import Timer
from typing import IO, Final, cast

from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import State

from ops import ssh
from ops.runner import Deploy

#: What a program reads, or who writes it.
Input = bytes | Callable[[IO[bytes]], None]
VM_PROGRAM: Final = "/usr/local/bin/warmstart-vm"
#: Of a program that failed, the lines that its failure is told with.
LAST_LINES: Final = 25


def stream(deploy: Deploy, *words: str, stdin: Input = b"", timeout_s: float) -> tuple[bool, list[str]]:
    """Runs `words` on the VM as root. Whether it ended well, and its last lines, which were said already."""
    process = subprocess.Popen(
        ssh.command(deploy.target, *words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    feed, said = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    stop = Timer(timeout_s, process.kill)
    stop.start()
    last: deque[str] = deque(maxlen=LAST_LINES)
    try:
        try:
            if callable(stdin):
                stdin(feed)
            else:
                feed.write(stdin)
            feed.close()
        except (BrokenPipeError, ConnectionError):
            last.append("it did not take its input")
        for raw in said:
            line = raw.decode(errors="replace").rstrip()
            last.append(line)
            deploy.say(f"    {line}")
        code = process.wait()
    finally:
        stop.cancel()
        process.kill()
        process.wait()
    if code < 0:
        last.append(f"stopped after {timeout_s:.0f} s" if code == -9 else f"stopped by signal {-code}")
    return code == 0, list(last)


def run(state: State, host: Host, deploy: Deploy, *words: str, stdin: Input = b"", timeout_s: float) -> bool:
    """The same as a function of a pyinfra operation: what failed fails the deploy, with its last lines."""
    ok, last = stream(deploy, *words, stdin=stdin, timeout_s=timeout_s)
    if not ok:
        logger.error("\n".join(last) or f"`{words[0]}` failed and said nothing")
    return ok
