"""The degradation matrix: what must come back from each operation while each dependency has each fault.

It drives the tests (test_matrix.py) and the page (degradation_page.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DEPENDENCIES: Final = ("embeddings", "redis", "redis-rest", "postgres", "worker", "disk")
#: How each is done, for the page.
FAULTS: Final = {
    "stopped": "`docker stop`",
    "paused": "`docker pause`: it takes connections, and answers nothing",
    "killed": "SIGKILL before each operation, with two clients saving and searching; the engine starts it again",
    "slow": "each answer comes 3 s late",
    "wrong-width": "vectors have one number too few",
    "html": "it answers with a web page",
    "429": "it answers 429 to everything",
    "500": "it answers 500 to everything",
    "reset": "it breaks off in the middle of each answer",
    "disk-full": "no byte is left on its volume",
    "cut": "`docker network disconnect`",
}
OPERATIONS: Final = (
    "search", "save", "batch", "get", "list", "delete", "restore", "mcp", "known-key", "unknown-key", "start",
)  # fmt: skip
#: Every run of the tests takes these; the rest is slow.
EVERY_RUN_FAULTS: Final = ("stopped", "paused")
EVERY_RUN_OPERATIONS: Final = ("search", "save", "mcp")

#: Seconds. Search: its budget of 2 s and 0.5; MCP: a save and a search, each of them within the time.
LIMITS_S: Final = dict.fromkeys(OPERATIONS, 3.0) | {"search": 2.5, "start": 30.0}
HEAL_LIMIT_S: Final = 60.0

_NO_DISK: Final = "it writes nothing: its root is read-only, and what it mounts to write is memory"
_NOT_HTTP: Final = "it speaks no HTTP; what the service sees of such a fault is that of redis-rest"
_NO_VECTORS: Final = "it makes no vectors, and keeps none"
_NOBODY_ASKS: Final = "nobody waits for an answer of the worker"
_NO_PROCESS: Final = "a volume of this machine is no process and has no network"
_NO_ANSWERS: Final = "a damaged file is no answer: the tests of the store's repair have those"

#: (dependency, fault) and why there is nothing to test, for all operations.
EXCLUDED: Final[dict[tuple[str, str], str]] = {
    ("embeddings", "disk-full"): _NO_DISK,
    ("redis", "disk-full"): _NO_DISK,
    ("redis", "wrong-width"): "a cached vector goes through redis-rest, which has this fault",
    ("redis", "429"): _NOT_HTTP,
    ("redis", "500"): _NOT_HTTP,
    ("redis-rest", "disk-full"): _NO_DISK,
    ("postgres", "wrong-width"): _NO_VECTORS,
    ("postgres", "429"): "it speaks no HTTP; `html` and `reset` are its wrong answers",
    ("postgres", "500"): "it speaks no HTTP; `html` and `reset` are its wrong answers",
    ("worker", "slow"): _NOBODY_ASKS,
    ("worker", "wrong-width"): _NO_VECTORS,
    ("worker", "html"): _NOBODY_ASKS,
    ("worker", "429"): _NOBODY_ASKS,
    ("worker", "500"): _NOBODY_ASKS,
    ("worker", "reset"): _NOBODY_ASKS,
    ("worker", "disk-full"): "its volume is the api's: the row of the disk",
    ("disk", "stopped"): _NO_PROCESS,
    ("disk", "paused"): _NO_PROCESS,
    ("disk", "killed"): _NO_PROCESS,
    ("disk", "slow"): "a volume of the engine can not be slowed without a block device of its own",
    ("disk", "wrong-width"): _NO_ANSWERS,
    ("disk", "html"): _NO_ANSWERS,
    ("disk", "429"): _NO_ANSWERS,
    ("disk", "500"): _NO_ANSWERS,
    ("disk", "reset"): _NO_ANSWERS,
    ("disk", "cut"): _NO_PROCESS,
}

#: The name in /v1/health, /readyz and `warmstart_dependency_up`, and the event that says it is down.
NAMES: Final = {
    "embeddings": ("embedding", "search.embedding.degraded"),
    "redis": ("redis", "circuit.opened"),
    "redis-rest": ("redis", "circuit.opened"),
    "postgres": ("postgres", "bookkeeping.down"),
}
#: A fault that comes and goes may be over before it is noticed; one that is met by care is no fault to speak of.
UNNOTICED: Final = frozenset({("redis-rest", "wrong-width"), ("postgres", "disk-full")})


@dataclass(frozen=True)
class Row:
    """One dependency with one fault."""

    dependency: str
    fault: str

    @property
    def id(self) -> str:
        return f"{self.dependency}-{self.fault}"

    @property
    def is_certain(self) -> bool:
        """It lasts through all operations; what was killed may be back before it is asked."""
        return self.fault != "killed"

    @property
    def noticed(self) -> tuple[str, str] | None:
        """Name and event of what health, metrics and log must report."""
        if not self.is_certain or (self.dependency, self.fault) in UNNOTICED:
            return None
        return NAMES.get(self.dependency)

    @property
    def queues(self) -> bool:
        """What needs the worker waits until the fault is over."""
        # a slow provider still serves the worker, who has time
        return self.is_certain and self.fault != "slow" and self.dependency in ("embeddings", "worker")


@dataclass(frozen=True)
class Cell:
    row: Row
    operation: str
    statuses: tuple[int, ...]
    #: Of a search in it; empty where there is none.
    modes: tuple[str, ...] = ()
    #: Reasons in a search's answer: all of these where the fault is certain, else some.
    degraded: tuple[str, ...] = ()
    #: Events in the api's log, and series that grow.
    logged: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.row.id}-{self.operation}"

    @property
    def within_s(self) -> float:
        return LIMITS_S[self.operation]


def rows() -> list[Row]:
    return [Row(d, f) for d in DEPENDENCIES for f in FAULTS if (d, f) not in EXCLUDED]


def cells() -> list[Cell]:
    return [cell(row, operation) for row in rows() for operation in OPERATIONS]


def every_run_rows() -> list[Row]:
    return [row for row in rows() if row.fault in EVERY_RUN_FAULTS]


_ROUTES: Final = {
    "search": ("POST", "/v1/search"),
    "save": ("POST", "/v1/memories"),
    "batch": ("POST", "/v1/memories/batch"),
    "get": ("GET", "/v1/memories/{id}"),
    "list": ("GET", "/v1/memories"),
    "delete": ("DELETE", "/v1/memories/{id}"),
    "restore": ("POST", "/v1/memories/{id}/restore"),
    "mcp": ("POST", "/mcp"),
    "known-key": ("GET", "/v1/memories"),
    # it is refused before it comes to a route
    "unknown-key": ("GET", "unrouted"),
}
_WELL: Final = {"save": 201, "batch": 200, "delete": 204, "mcp": 201, "unknown-key": 401}
_WRITES: Final = ("save", "batch", "delete", "restore", "mcp")


def cell(row: Row, operation: str) -> Cell:
    """What must come of `operation`. The status of `mcp` is its save's."""
    statuses = _statuses(row, operation)
    modes, degraded = _search(row) if operation in ("search", "mcp", "start") else ((), ())
    logged, counted = [], []
    if row.is_certain and operation in ("search", "mcp"):
        counted.append(f'warmstart_searches_total{{mode="{modes[0]}"}}')
    if row.is_certain and row.dependency == "embeddings":
        for part, event in (("search", "search.embedding.degraded"), ("save", "save.embedding.queued")):
            if operation in (part, "mcp"):
                logged.append(event)
                counted.append(f'warmstart_degraded_total{{operation="{part}",reason="embedding"}}')
    if row.is_certain and operation in ("save", "mcp") and statuses == (201,):
        outcome = "queued" if row.dependency == "embeddings" else "inline"
        counted.append(f'warmstart_saves_total{{outcome="{outcome}"}}')
    if operation.endswith("-key") and len(statuses) == 1:
        outcome = {200: "ok", 401: "unauthorized", 503: "unavailable"}[statuses[0]]
        counted.append(f'warmstart_logins_total{{outcome="{outcome}"}}')
    if operation in _ROUTES and len(statuses) == 1:
        method, route = _ROUTES[operation]
        status = 200 if operation == "mcp" else statuses[0]
        if status >= 500:
            logged.append("http.request")  # in the log of others a line that repeats is left out
        counted.append(f'warmstart_http_requests_total{{method="{method}",route="{route}",status="{status}"}}')
    return Cell(row, operation, statuses, modes, degraded, tuple(logged), tuple(counted))


def _statuses(row: Row, operation: str) -> tuple[int, ...]:
    if row.dependency == "disk" and operation in _WRITES:
        return (507,)
    if row.dependency == "postgres" and operation == "unknown-key":
        # a full disk is still read, and what was killed may be back
        return (503,) if row.is_certain and row.fault != "disk-full" else (401, 503)
    return (_WELL.get(operation, 200),)


def _search(row: Row) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Modes and reasons."""
    if row.dependency != "embeddings":
        return ("hybrid",), ()
    return ("keyword",) if row.is_certain else ("hybrid", "keyword"), ("embedding",)
