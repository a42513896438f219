"""The operations of the matrix as a client does them, and what one tenant must find again afterwards."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import ssl
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx
import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from stack import Stack, command, wait_until

from containers.faults import container, execute

#: In each memory of the other tenant, and in no answer.
STRANGER: Final = "xenolith"
BATCH: Final = 5
LOADERS: Final = 2


@dataclass
class Outcome:
    status: int
    seconds: float
    body: str
    mode: str = ""
    degraded: tuple[str, ...] = ()


class Visitor:
    """One tenant under one fault, in a namespace of its own. Keeps what was acknowledged."""

    def __init__(self, stack: Stack, key: str) -> None:
        self.stack, self.key = stack, key
        self.mark = f"zq{uuid.uuid4().hex[:10]}"
        self.namespace = f"matrix-{self.mark}"
        self.needle = f"zx{uuid.uuid4().hex[:10]}"
        self.http = stack.client(key)
        #: Ids of what must be there at the end, and of what must not.
        self.kept: set[str] = set()
        self.gone: set[str] = set()
        self._lock = threading.Lock()
        self.found = self._prepare(f"to be found {self.needle}")
        self.doomed = self._prepare("to be deleted")
        self.trashed = self._prepare("to be restored")
        self._delete(self.trashed)

    def close(self) -> None:
        self.http.close()

    def run(self, operation: str) -> Outcome:
        return _OPERATIONS[operation](self)

    # -- before

    def _prepare(self, what: str) -> str:
        answer = self.http.post("/v1/memories", json=self._memory(what)).raise_for_status().json()
        assert answer["embedding_status"] == "ready", answer
        self.kept.add(answer["id"])
        return str(answer["id"])

    def _delete(self, memory_id: str) -> None:
        self.http.delete(f"/v1/memories/{memory_id}").raise_for_status()
        self._is_gone(memory_id)

    def _memory(self, what: str) -> dict[str, str]:
        # shares words with what the other tenant has
        return {"content": f"Walrus {self.mark} {what} {uuid.uuid4().hex}", "namespace": self.namespace}

    def _query(self) -> dict[str, Any]:
        """Another one each time, so that no vector is known. Among fifty is what is first in one arm."""
        return {"query": f"walrus {self.needle} {uuid.uuid4().hex}", "limit": 50}

    def _is_kept(self, memory_id: str) -> None:
        with self._lock:
            self.kept.add(memory_id)
            self.gone.discard(memory_id)

    def _is_gone(self, memory_id: str) -> None:
        self.kept.discard(memory_id)
        self.gone.add(memory_id)

    # -- operations

    def _timed(self, method: str, path: str, http: httpx.Client | None = None, **options: Any) -> Outcome:
        started = time.monotonic()
        answer = (http or self.http).request(method, path, **options)
        return Outcome(answer.status_code, time.monotonic() - started, answer.text)

    def search(self) -> Outcome:
        outcome = self._timed("POST", "/v1/search", json=self._query())
        if outcome.status == 200:
            self._found(outcome, json.loads(outcome.body))
        return outcome

    def _found(self, outcome: Outcome, answer: dict[str, Any]) -> None:
        outcome.mode, outcome.degraded = answer["mode"], tuple(answer["degraded"])
        ids = [hit["id"] for hit in answer["hits"]]
        assert self.found in ids, "what was saved before the fault is not found"
        assert not self.gone.intersection(ids)

    def save(self) -> Outcome:
        outcome = self._timed("POST", "/v1/memories", json=self._memory("saved"))
        if outcome.status == 201:
            self._is_kept(json.loads(outcome.body)["id"])
        return outcome

    def batch(self) -> Outcome:
        memories = [self._memory(f"of a batch {i}") for i in range(BATCH)]
        outcome = self._timed("POST", "/v1/memories/batch", json={"memories": memories})
        if outcome.status == 200:
            results = json.loads(outcome.body)["results"]
            assert [result["status"] for result in results] == ["created"] * BATCH
            for result in results:
                self._is_kept(result["id"])
        return outcome

    def get(self) -> Outcome:
        return self._timed("GET", f"/v1/memories/{self.found}")

    def list(self) -> Outcome:
        outcome = self._timed("GET", "/v1/memories", params={"namespace": self.namespace, "limit": 200})
        if outcome.status == 200:
            ids = {row["id"] for row in json.loads(outcome.body)["memories"]}
            assert self.found in ids
            assert not ids & self.gone
        return outcome

    def delete(self) -> Outcome:
        outcome = self._timed("DELETE", f"/v1/memories/{self.doomed}")
        if outcome.status == 204:
            self._is_gone(self.doomed)
        return outcome

    def restore(self) -> Outcome:
        outcome = self._timed("POST", f"/v1/memories/{self.trashed}/restore")
        if outcome.status == 200:
            self._is_kept(self.trashed)
        return outcome

    def known_key(self) -> Outcome:
        return self._timed("GET", "/v1/memories", params={"limit": 1})

    def unknown_key(self) -> Outcome:
        with self.stack.client(f"ws_sk_{secrets.token_urlsafe(32)}") as http:
            outcome = self._timed("GET", "/v1/memories", http=http)
        assert self.mark not in outcome.body
        return outcome

    def mcp(self) -> Outcome:
        """A save and a search; the status is the save's, the time that of the longer one."""
        return asyncio.run(self._mcp())

    async def _mcp(self) -> Outcome:
        context = ssl.create_default_context(cafile=str(self.stack.authority))
        headers = {"Authorization": f"Bearer {self.key}"}
        async with (
            httpx2.AsyncClient(verify=context, headers=headers, timeout=30, trust_env=False) as http,
            Client(streamable_http_client(f"{self.stack.url}/mcp", http_client=http)) as client,
        ):
            started = time.monotonic()
            saved = await client.call_tool("memory_save", self._memory("saved by MCP"))
            save_s = time.monotonic() - started
            started = time.monotonic()
            found = await client.call_tool("memory_search", self._query())
            search_s = time.monotonic() - started
        assert not found.is_error, found
        status = 201
        if saved.is_error:
            status = json.loads(saved.content[0].text)["status"]
        else:
            self._is_kept(saved.structured_content["id"])
        outcome = Outcome(status, max(save_s, search_s), f"{saved}{found}")
        self._found(outcome, found.structured_content)
        return outcome

    def start(self) -> Outcome:
        """From the order to start anew to the first answer to a search."""
        started = time.monotonic()
        command("docker", "restart", container(self.stack, "api"))
        wait_until("the api is ready", lambda: self.http.get("/readyz").status_code == 200, every_s=0.1)
        outcome = self.search()
        outcome.seconds = time.monotonic() - started
        return outcome

    # -- afterwards

    def settle(self) -> None:
        """Raises AssertionError unless all that was acknowledged is there once, embedded, and booked."""
        rows = list(self._rows())
        ids = {row["id"] for row in rows}
        assert len({row["content"] for row in rows}) == len(rows), "a memory is there twice"
        assert self.kept <= ids, f"lost: {self.kept - ids}"
        assert not self.gone & ids, f"back from the dead: {self.gone & ids}"
        waiting = [row["id"] for row in rows if row["embedding_status"] != "ready"]
        assert not waiting, f"not embedded: {waiting}"
        booked = booked_as_ready(self.stack, ids)
        assert booked == ids, f"not booked as ready: {ids - booked}"

    def _rows(self) -> Iterator[dict[str, Any]]:
        params: dict[str, Any] = {"namespace": self.namespace, "limit": 200}
        while True:
            page = self.http.get("/v1/memories", params=params).raise_for_status().json()
            yield from page["memories"]
            if not page["next_cursor"]:
                return
            params["cursor"] = page["next_cursor"]


_OPERATIONS: Final[dict[str, Callable[[Visitor], Outcome]]] = {
    "search": Visitor.search, "save": Visitor.save, "batch": Visitor.batch, "get": Visitor.get, "list": Visitor.list,
    "delete": Visitor.delete, "restore": Visitor.restore, "mcp": Visitor.mcp, "known-key": Visitor.known_key,
    "unknown-key": Visitor.unknown_key, "start": Visitor.start,
}  # fmt: skip


def booked_as_ready(stack: Stack, ids: set[str]) -> set[str]:
    query = (
        "SELECT memory_id FROM memory_status WHERE status = 'ready' AND memory_id = ANY(string_to_array(:'ids', ','))"
    )
    words = ["psql", "--username=warmstart", "--no-align", "--tuples-only", f"--set=ids={','.join(ids)}"]
    # psql puts variables into what it reads, not into --command
    return set(execute(stack, "postgres", *words, stdin=query).split())


@contextmanager
def load(visitor: Visitor) -> Iterator[None]:
    """Clients that save and search until the end; each of their requests must succeed."""
    over = threading.Event()
    faults: list[str] = []

    def work() -> None:
        while not over.is_set():
            try:
                for outcome in (visitor.save(), visitor.search()):
                    if outcome.status not in (200, 201):
                        faults.append(f"{outcome.status} {outcome.body[:300]}")
            except (AssertionError, httpx.HTTPError) as error:
                faults.append(repr(error))
            over.wait(0.1)

    threads = [threading.Thread(target=work) for _ in range(LOADERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not faults, faults[:3]


# -- what the api counts and says


def series(stack: Stack) -> dict[str, float]:
    """The api's metrics, by name and labels."""
    url = f"http://{stack.address('api')}:8484/metrics"
    text = httpx.get(url, headers={"Host": "127.0.0.1"}, trust_env=False).raise_for_status().text
    return {name: float(value) for name, value in re.findall(r"^(warmstart_\S+(?: \S+)*) (\S+)$", text, re.MULTILINE)}


def events(stack: Stack, since: float) -> set[str]:
    """Of the api's log, from the time `since` (Unix) on."""
    words = ["docker", "logs", "--since", f"{since:.6f}", container(stack, "api")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    lines = (done.stdout + done.stderr).splitlines()
    return {json.loads(line)["event"] for line in lines if line.startswith("{")}
