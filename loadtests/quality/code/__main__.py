"""The indexer on real packages: speed, memory, what a next run costs, and whether questions find their symbol.

    python -m loadtests.quality.code [--json] [--misses]

Fetches the packages of `packages.json` with pip, npm and apt-get, indexes each
with `warmstart index` into a service with its embedded parts on a fresh home,
and asks the questions of `questions.jsonl`: hybrid over HTTP, the arms alone
from the same table.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from loadtests.quality.__main__ import ARMS, DEPTHS, Asked, beside, hit, service
from warmstart.client import MemoryClient
from warmstart.errors import AuthUnavailable
from warmstart.indexer.files import look
from warmstart.indexer.walk import Walk
from warmstart.logs import configure
from warmstart.memory import SearchRequest
from warmstart.runtime import Runtime

HERE = Path(__file__).parent
FETCH: Final = {
    "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"],
    "npm": ["npm", "pack", "--silent"],
    "apt": ["apt-get", "download"],
}
#: Added at the end of a file: a function, in the language of the file.
ADDED: Final = {
    ".py": "\n\ndef added_for_the_measurement(value):\n    \"\"\"Gives it back.\"\"\"\n    return value\n",
    ".ts": "\n/** Gives it back. */\nexport function addedForTheMeasurement(value: any) { return value }\n",
    ".go": "\n// addedForTheMeasurement gives it back.\nfunc addedForTheMeasurement(v int) int { return v }\n",
}  # fmt: skip
CHANGED_SHARE: Final = 0.01
TELL_EVERY_S: Final = 10.0


@dataclass
class Measured:
    files: int = 0
    symbols: int = 0
    #: Processor seconds of one process: reading, parsing, finding; nothing sent.
    extraction_s: float = 0.0
    full_s: float = 0.0
    #: Until the last vector is there, from the run's start.
    full_vectors_s: float = 0.0
    unchanged_s: float = 0.0
    changed_files: int = 0
    changed_s: float = 0.0
    changed_vectors_s: float = 0.0
    peak_mb: float = 0.0
    tokens: dict[str, Any] = field(default_factory=dict)


def fetch(package: dict[str, str], into: Path) -> Path:
    """The directory of the package's sources."""
    into.mkdir(parents=True)
    subprocess.run([*FETCH[package["from"]], package["name"]], cwd=into, check=True, stdout=subprocess.DEVNULL)
    [archive] = into.iterdir()
    unpack = ["dpkg", "-x", archive.name, "."] if archive.suffix == ".deb" else ["tar", "xf", archive.name]
    subprocess.run(unpack, cwd=into, check=True)
    return into / package["directory"]


def extraction(root: Path) -> Measured:
    began = time.process_time()
    looked = [look(found) for found in Walk(root).files()]
    took = time.process_time() - began
    kept = [one for one in looked if one.outcome == "symbols"]
    return Measured(len(kept), sum(len(one.symbols) for one in kept), took)


async def index(root: Path, name: str, url: str, key: str) -> tuple[dict[str, Any], float]:
    """The summary of `warmstart index`, and the most memory it had, in MB."""

    def run() -> tuple[dict[str, Any], float]:
        environ = os.environ | {"WARMSTART_URL": url, "WARMSTART_API_KEY": key}
        command = [sys.executable, "-m", "warmstart.cli", "index", str(root), "--namespace", f"code-{name}", "--json"]
        with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout
            out = child.stdout.read()
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        assert child.returncode == 0, out
        return json.loads(out.splitlines()[-1]), usage.ru_maxrss / 1024

    return await asyncio.to_thread(run)


def edit(root: Path) -> int:
    """Changes one file in a hundred, at least one; how many."""
    files = [found.file for found in Walk(root).files() if found.file.suffix in ADDED]
    some = files[:: max(1, len(files) // math.ceil(len(files) * CHANGED_SHARE))][
        : math.ceil(len(files) * CHANGED_SHARE)
    ]
    for file in some:
        file.write_text(file.read_text() + ADDED[file.suffix])
    return len(some)


Waiting = Callable[[], Awaitable[float]]


async def measure(root: Path, name: str, url: str, key: str, vectors: Waiting) -> Measured:
    """`vectors` waits until all of them are there, and says for how long."""
    measured = extraction(root)
    summary, measured.peak_mb = await index(root, name, url, key)
    assert (summary["files"], summary["symbols"]) == (measured.files, measured.symbols), summary
    measured.full_s, measured.tokens = summary["seconds"], summary["tokens"]
    measured.full_vectors_s = measured.full_s + await vectors()
    measured.unchanged_s = (await index(root, name, url, key))[0]["seconds"]
    measured.changed_files = edit(root)
    summary, _ = await index(root, name, url, key)
    assert summary["new"] == measured.changed_files, summary
    measured.changed_s = summary["seconds"]
    measured.changed_vectors_s = measured.changed_s + await vectors()
    return measured


async def ask(client: MemoryClient, runtime: Runtime, tenant: str, question: dict[str, Any]) -> Asked:
    asked = Asked(question | {"kind": question["package"]})
    request = SearchRequest(query=question["question"], namespace=f"code-{question['package']}", limit=max(DEPTHS))
    ids = await beside(runtime, tenant, request)
    found = await client.search(request)
    assert not found.degraded, found.degraded
    ids["hybrid"] = [memory.id for memory in found.hits]
    for arm in ARMS:
        rows = [await client.get(memory_id) for memory_id in ids[arm][: max(DEPTHS)]]
        places = [f"{row.metadata['path']} {row.metadata['name']}" for row in rows]
        asked.ranks[arm] = next((n for n, place in enumerate(places, 1) if place in question["answers"]), None)
    return asked


async def tenant_of(runtime: Runtime, key: str) -> str:
    while True:
        try:
            return (await runtime.keys.identify(key)).user_id
        except AuthUnavailable:  # a busy machine's Postgres
            await asyncio.sleep(0.5)


async def run(packages: Path) -> tuple[dict[str, Measured], list[Asked]]:
    sources = json.loads((HERE / "packages.json").read_text())
    questions = [json.loads(line) for line in (HERE / "questions.jsonl").read_text().splitlines()]
    roots = {name: fetch(package, packages / name) for name, package in sources.items()}
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)  # the embedded Postgres may run as another user
        async with service(Path(directory) / "home") as (runtime, mcp_url, key):
            url = mcp_url.removesuffix("/mcp")
            tenant = await tenant_of(runtime, key)

            async def vectors() -> float:
                began = told = time.monotonic()
                while queued := (await runtime.service(tenant).health()).queued:
                    if time.monotonic() - told > TELL_EVERY_S:
                        told = time.monotonic()
                        click.echo(f"{queued} wait for their vector", err=True)
                    await asyncio.sleep(0.2)
                return time.monotonic() - began

            measured = {name: await measure(root, name, url, key, vectors) for name, root in roots.items()}
            async with MemoryClient(url, key) as client:
                asked = [await ask(client, runtime, tenant, question) for question in questions]
    return measured, asked


def report(measured: dict[str, Measured], asked: list[Asked]) -> str:
    rows = [
        "| package | files | symbols | files/s | symbols/s | peak MB | full run: sent | with vectors "
        "| unchanged | 1 % changed: sent | with vectors |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, m in measured.items():
        speed = f"{m.files / m.extraction_s:.0f} | {m.symbols / m.extraction_s:,.0f}"
        rows.append(
            f"| {name} | {m.files} | {m.symbols:,} | {speed} "
            f"| {m.peak_mb:.0f} | {m.full_s:.1f} s | {m.full_vectors_s:.0f} s | {m.unchanged_s:.2f} s "
            f"| {m.changed_s:.2f} s ({m.changed_files} files) "
            f"| {m.changed_vectors_s:.2f} s (**{m.changed_vectors_s / m.full_vectors_s:.1%}**) |"
        )
    rows += [
        "",
        "| package | tokens a symbol: mean | median | p90 | max | all files whole |",
        "|---|---|---|---|---|---|",
    ]
    for name, m in measured.items():
        t = m.tokens
        rows.append(f"| {name} | {t['mean']} | {t['median']:g} | {t['p90']} | {t['max']} | {t['files']:,} |")
    rows += ["", "| questions | n | arm | hit@1 | hit@5 | hit@10 |", "|---|---|---|---|---|---|"]
    for label, some in [("all", asked), *((n, [a for a in asked if a.query["kind"] == n]) for n in measured)]:
        for arm in ARMS:
            rows.append(f"| {label} | {len(some)} | {arm} | {' | '.join(f'{hit(some, arm, d):.3f}' for d in DEPTHS)} |")
    return "\n".join(rows)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="The figures as one JSON object.")
@click.option("--misses", is_flag=True, help="List the questions whose symbol is not among the first five.")
def main(as_json: bool, misses: bool) -> None:
    """Measure the indexer on three packages."""
    configure("error", "console")
    with tempfile.TemporaryDirectory() as directory:
        measured, asked = asyncio.run(run(Path(directory) / "packages"))
    if as_json:
        hits = {arm: {f"hit@{d}": round(hit(asked, arm, d), 4) for d in DEPTHS} for arm in ARMS}
        click.echo(json.dumps({"packages": {name: asdict(m) for name, m in measured.items()}, "hits": hits}))
        return
    click.echo(report(measured, asked))
    if misses:
        for a in asked:
            if (a.ranks["hybrid"] or 99) > 5:
                click.echo(f"{a.query['package']} {a.ranks} {a.query['question']!r}")


if __name__ == "__main__":
    main()
