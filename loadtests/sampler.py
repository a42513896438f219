"""What the service says of itself while the load runs: queue and memory, every two seconds."""

from __future__ import annotations

import csv
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

EVERY_S: Final = 2.0
TIMEOUT_S: Final = 2.0
QUEUE: Final = "warmstart_queued_memories"
MEMORY: Final = "process_resident_memory_bytes"
IN_FLIGHT: Final = "warmstart_http_in_flight"
FIELDS: Final = ("second", "process", "queued", "memory_mb", "in_flight")


@dataclass(frozen=True, slots=True)
class Reading:
    """None: the process did not answer, or does not tell."""

    second: float
    process: str
    queued: float | None
    memory_mb: float | None
    in_flight: float | None


#: Of a process: the URL of its metrics now, or a raised OSError where it has none.
Source = Callable[[], str]


class Sampler:
    """While its context lasts. `sources`: where each process has its metrics; `health`: else, a client with a key."""

    def __init__(self, sources: Mapping[str, Source], health: httpx.Client | None = None) -> None:
        self._sources, self._health = sources, health
        #: Seconds are Unix time here.
        self.readings: list[Reading] = []
        self._urls: dict[str, str] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client(timeout=TIMEOUT_S, trust_env=False) as http:
            while not self._over.wait(EVERY_S):
                for process, source in self._sources.items():
                    self.readings.append(self._read(http, process, source))
                if self._health is not None:
                    self.readings.append(_from_health(self._health))

    def _read(self, http: httpx.Client, process: str, source: Source) -> Reading:
        try:
            url = self._urls[process] = self._urls.get(process) or source()
            # the name of the host as the service knows itself
            text = http.get(url, headers={"Host": "127.0.0.1"}).raise_for_status().text
        except (httpx.HTTPError, OSError, AssertionError):
            self._urls.pop(process, None)  # a process that was started anew may be elsewhere
            return Reading(time.time(), process, None, None, None)
        memory = metric(text, MEMORY)
        return Reading(
            time.time(), process, metric(text, QUEUE), memory and memory / 2**20, metric(text, IN_FLIGHT)
        )  # fmt: skip


def _from_health(client: httpx.Client) -> Reading:
    try:
        queued = client.get("/v1/health", timeout=TIMEOUT_S).raise_for_status().json()["queued"]
    except httpx.HTTPError:
        queued = None
    return Reading(time.time(), "tenant", queued, None, None)


def metric(text: str, name: str) -> float | None:
    """A value without labels, from Prometheus' text."""
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else None


def write(path: Path, readings: list[Reading], began: float) -> list[Reading]:
    """As CSV, in seconds since `began` (Unix time); gives them so."""
    moved = [Reading(r.second - began, r.process, r.queued, r.memory_mb, r.in_flight) for r in readings]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(FIELDS)
        rows.writerows((f"{r.second:.1f}", r.process, *map(_cell, (r.queued, r.memory_mb, r.in_flight))) for r in moved)
    return moved


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
