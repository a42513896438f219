"""A round trip of 100,000 memories through real processes, whose memory does not grow with it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from integration.test_serve import STOP_S, WARMSTART, Place, place, until
from warmstart.exchange import SCHEMA
from warmstart.store.schema import new_id

__all__ = ["place"]

FEW, MANY = 10_000, 100_000
PATIENCE_S = 3_600
#: MB by which a process may be larger at its largest with ten times the memories. 100,000 of them are 70 MB of NDJSON,
#: and several times that as objects. The engine keeps caches of up to 320 MB in a server that writes (store/table.py).
CLIENT_GROWTH, EXPORT_GROWTH, IMPORT_GROWTH = 16, 100, 320
CLIENT_PEAK = 120


def write(path: Path, count: int) -> None:
    """An export of `count` memories: a tenth in the trash, a fifth edited once or more."""
    dice = random.Random(count)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    with path.open("w", encoding="utf-8") as file:
        header = {"schema": SCHEMA, "exported_at": "2026-11-01T00:00:00Z", "count": count}
        file.write(json.dumps(header) + "\n")
        for number in range(count):
            at = start + timedelta(seconds=number, microseconds=dice.randrange(1_000_000))
            memory = text(f"memory {number} of {count}: " + "a word or two " * dice.randrange(1, 60), at) | {
                "id": new_id(), "created_at": time(start),
            }  # fmt: skip
            if number % 10 == 0:
                memory |= {"deleted_at": time(at), "expires_at": time(at + timedelta(days=10_000))}
            if number % 5 == 0:
                before = [
                    text(f"memory {number} once, {n}", start) | {"version": n} for n in range(1 + number % 3, 0, -1)
                ]
                memory["history"] = before
            file.write(json.dumps(memory, ensure_ascii=False, separators=(",", ":")) + "\n")


def text(content: str, at: datetime) -> dict[str, Any]:
    return {
        "namespace": "large", "type": "fact", "title": content[:60].strip(), "content": content, "facts": [],
        "tags": ["a", "b"], "entities": [], "importance": 0.25, "source": "test", "metadata": {"n": [1, "é"]},
        "content_hash": hashlib.sha256(content.encode()).hexdigest(), "occurred_at": time(at), "updated_at": time(at),
    }  # fmt: skip


def time(at: datetime) -> str:
    return at.isoformat().replace("+00:00", "Z")


def digest(path: Path) -> tuple[int, int]:
    """Lines, and a sum over them that does not mind their order; of each memory as JSON, not of its bytes."""
    count = total = 0
    with path.open("rb") as file:
        next(file)
        for line in file:
            count += 1
            same = json.dumps(json.loads(line), sort_keys=True).encode()
            total = (total + int.from_bytes(hashlib.sha256(same).digest())) % (1 << 256)
    return count, total


@contextmanager
def peak_of(pid: int) -> Iterator[list[float]]:
    """The process's largest resident size meanwhile, in MB."""
    peak, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                return
            for line in status.splitlines():
                if line.startswith("VmRSS:"):
                    peak[0] = max(peak[0], int(line.split()[1]) / 1024)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def run(place: Place, server: int, *arguments: str) -> tuple[dict[str, Any], float, float]:
    """What the command told, and the peaks of it and of the server."""
    environ = place.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    with peak_of(server) as of_server:
        command = subprocess.Popen(
            [*WARMSTART, *arguments, "--json"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with peak_of(command.pid) as of_client:
            out, err = command.communicate(timeout=PATIENCE_S)
    assert command.returncode == 0, (out[-500:], err[-2_000:])
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told, of_client[0], of_server[0]


@pytest.mark.slow
def test_a_hundred_thousand_memories_go_in_and_out_in_constant_memory(place: Place, tmp_path: Path) -> None:
    def fresh(*arguments: str) -> subprocess.Popen[str]:
        # alone: the worker has nothing to embed with, and the embedder's memory is not what is measured
        made = place.serve(*arguments, EMBEDDING_ENABLED="False", PYTHONPATH=os.environ.get("PYTHONPATH", ""))
        until(lambda: (found := place.home.server()) and found.pid == made.pid, PATIENCE_S)
        place.ready()
        return made

    peaks: dict[tuple[str, int], tuple[float, float]] = {}
    for count in (FEW, MANY):
        given, back = tmp_path / f"{count}.ndjson", tmp_path / f"{count}.back.ndjson"
        write(given, count)
        server = fresh()
        told, *peaks["import", count] = run(place, server.pid, "import", str(given))  # type: ignore[assignment]
        # on a busy machine an answer may come too late, and the memories are sent again
        assert (told["created"] + told["unchanged"], told["duplicates"], told["differing"]) == (count, 0, 0)
        stop(server)
        # what its worker needs to compact what came in is not what an export needs
        server = fresh("--no-worker")
        told, *peaks["export", count] = run(place, server.pid, "export", str(back))  # type: ignore[assignment]
        if count == FEW:
            assert told["memories"] == FEW
            assert digest(back) == digest(given)
            stop(server)
    # what was there before is in the second export, too
    small, large, both = (digest(tmp_path / f"{name}.ndjson") for name in (FEW, MANY, f"{MANY}.back"))
    assert both == (small[0] + large[0], (small[1] + large[1]) % (1 << 256))
    told, *peaks["again", MANY] = run(place, server.pid, "import", str(tmp_path / f"{MANY}.back.ndjson"))
    assert told["unchanged"] == FEW + MANY
    print({f"{what} {count}": [round(p) for p in found] for (what, count), found in peaks.items()})
    for what, most in (("import", IMPORT_GROWTH), ("export", EXPORT_GROWTH)):
        (few_client, few_server), (many_client, many_server) = peaks[what, FEW], peaks[what, MANY]
        assert many_client < CLIENT_PEAK
        assert many_client - few_client < CLIENT_GROWTH, (what, peaks)
        assert many_server - few_server < most, (what, peaks)


def stop(server: subprocess.Popen[str]) -> None:
    server.terminate()
    assert server.wait(STOP_S) == 0
