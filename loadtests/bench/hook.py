"""How long a prompt waits for its hook: the process from its start to its end, as a coding agent has it.

    python -m loadtests.bench.hook [--rounds 40]

The service runs in the measuring process, with its embedded parts and the notes of
loadtests/quality. `interpreter` is a Python that does nothing, started in the
same minute: what no hook in Python can go below.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from loadtests.quality.__main__ import SETS, lines, service
from loadtests.quality.silence import save
from warmstart.context import count_tokens
from warmstart.logs import configure

HOOK = [sys.executable, "-m", "warmstart.hooks", "prompt"]


@dataclass(frozen=True)
class Run:
    """Milliseconds on the clock and of the processor, and what it printed."""

    took: float
    cpu: float
    printed: str


def timed(command: list[str], event: dict[str, Any], env: dict[str, str]) -> Run:
    before, began = _cpu_s(), time.perf_counter()
    done = subprocess.run(command, input=json.dumps(event), env=env, capture_output=True, text=True, check=True)
    return Run((time.perf_counter() - began) * 1000, (_cpu_s() - before) * 1000, done.stdout)


def _cpu_s() -> float:
    """Of the children that have ended; one at a time is run here."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def told(name: str, runs: list[Run]) -> str:
    ordered = sorted(run.took for run in runs)
    cpu = sorted(run.cpu for run in runs)[len(runs) // 2]
    p95 = ordered[min(len(ordered) - 1, round(len(ordered) * 0.95))]
    return f"| {name} | {len(runs)} | {ordered[len(ordered) // 2]:.0f} | {p95:.0f} | {ordered[-1]:.0f} | {cpu:.0f} |"


async def run(rounds: int) -> str:
    rows = ["| | n | p50 ms | p95 ms | most | CPU ms, p50 |", "|---|---|---|---|---|---|"]
    prompts = [q["query"] for name in SETS.values() for q in lines(name)][: rounds + 1]
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)
        async with service(Path(directory) / "home") as (runtime, url, key):
            tenant = (await runtime.bookkeeping.tenants())[-1].id
            await save(runtime.service(tenant), lines("notes.jsonl"))
            env = dict(os.environ) | {"WARMSTART_URL": url.removesuffix("/mcp"), "WARMSTART_API_KEY": key}

            async def measured(command: list[str], text: str) -> Run:
                event = {"hook_event_name": "UserPromptSubmit", "prompt": text}
                return await asyncio.to_thread(timed, command, event, env)

            first = await measured(HOOK, prompts[0])
            prompted = [await measured(HOOK, text) for text in prompts[1:]]
            bare = [await measured([sys.executable, "-c", "pass"], "") for _ in range(rounds)]
            with socket.create_server(("127.0.0.1", 0)) as silent:
                env["WARMSTART_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"
                hanging = [await measured(HOOK, text) for text in prompts[:10]]
            env["WARMSTART_URL"] = "http://127.0.0.1:9"
            down = [await measured(HOOK, text) for text in prompts[1:]]
    tokens = sorted(count_tokens(run.printed) for run in prompted if run.printed)
    rows += [
        told("first prompt after the server's start", [first]),
        told("a prompt", prompted),
        told("server down", down),
        told("server hangs", hanging),
        told("interpreter", bare),
    ]
    spoke = f"{len(tokens)} of {len(prompted)} prompts got a block"
    rows += [
        "",
        f"{spoke}; tokens (cl100k_base): median {tokens[len(tokens) // 2]}, most {tokens[-1]}." if tokens else spoke,
    ]
    return "\n".join([*rows, "", f"Load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."])


@click.command()
@click.option("--rounds", default=40, help="Prompts.")
def main(rounds: int) -> None:
    """Measure the hook."""
    configure("error", "console")
    print(asyncio.run(run(rounds)))


if __name__ == "__main__":
    main()
