"""`warmstart serve` and its clients as people meet them: real processes on real homes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from warmstart.cli import main
from warmstart.client import MemoryClient
from warmstart.home import Home, ServerInfo
from warmstart.memory import Batch, NewMemory, SearchRequest
from warmstart.postgres import EmbeddedPostgres, running_dsn

WARMSTART = [sys.executable, "-m", "warmstart.cli"]
START_S = 60.0
STOP_S = 30.0
KEY = re.compile(r"ws_sk_[A-Za-z0-9_-]{43}")


class Place:
    """A home, the programs run on it, and what is left of them at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = Home(directory / "home")
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(directory),
            "WARMSTART_HOME": str(self.home.path),
            **{name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ},
            "WARMSTART_ALLOW_ROOT": "True",
        }
        self.servers: list[subprocess.Popen[str]] = []

    def serve(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        with (self.directory / "serve.out").open("w") as out, (self.directory / "serve.err").open("w") as err:
            server = subprocess.Popen(
                [*WARMSTART, "serve", "--port", "0", *arguments],
                env=self.environ | environ, stdout=out, stderr=err, text=True, start_new_session=True,
            )  # fmt: skip
        self.servers.append(server)
        return server

    def ready(self) -> ServerInfo:
        info = until(self.home.server, START_S)
        assert info is not None, self.said()
        until(lambda: "stops it" in self.said(), 5)
        return info

    def said(self) -> str:
        return (self.directory / "serve.out").read_text() + (self.directory / "serve.err").read_text()

    def run(self, *arguments: str, stdin: str = "", **environ: str) -> Result:
        """A command in this process, since starting one each time is most of the time."""
        handlers = logging.getLogger().handlers[:]
        unset = dict.fromkeys(name for name in os.environ if name not in self.environ)
        try:
            return CliRunner().invoke(main, arguments, input=stdin, env=unset | self.environ | environ)
        finally:
            for added in set(logging.getLogger().handlers) - set(handlers):
                logging.getLogger().removeHandler(added)
                added.close()

    def run_apart(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*WARMSTART, *arguments], env=self.environ | environ, capture_output=True, text=True, timeout=START_S
        )

    def json(self, *arguments: str, code: int = 0, **options: str) -> Any:
        done = self.run(*arguments, "--json", **options)
        assert done.exit_code == code, done.output
        assert "Traceback" not in done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def end(self) -> None:
        holder = self.home.holder()
        pids = {server.pid for server in self.servers if server.poll() is None} | ({holder.pid} if holder else set())
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for server in self.servers:
            server.wait(STOP_S)
        until(lambda: self.home.holder() is None, STOP_S)
        shutil.rmtree(self.directory)


@pytest.fixture
def place() -> Iterator[Place]:
    found = Place(Path(tempfile.mkdtemp(prefix="wst-")))
    try:
        yield found
    finally:
        found.end()


@pytest.fixture(scope="module")
def served() -> Iterator[Place]:
    """A home with a running server."""
    found = Place(Path(tempfile.mkdtemp(prefix="wst-")))
    try:
        found.serve()
        found.ready()
        yield found
    finally:
        found.end()


def until(done: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := done()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def descendants(pid: int) -> set[int]:
    children = {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return children | {below for child in children for below in descendants(child)}


def alive(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
    return found


def save(info: ServerInfo, content: str) -> str:
    async def work() -> str:
        async with MemoryClient(info.url, info.api_key) as memory:
            return (await memory.save(NewMemory(content=content))).id

    return asyncio.run(work())


def save_unembedded(info: ServerInfo, content: str) -> str:
    """A batch is left to the worker."""

    async def work() -> str:
        async with MemoryClient(info.url, info.api_key) as memory:
            return (await memory.save_batch(Batch(memories=[NewMemory(content=content)]))).results[0].id

    return asyncio.run(work())


def found_by(info: ServerInfo, query: str) -> list[str]:
    async def work() -> list[str]:
        async with MemoryClient(info.url, info.api_key) as memory:
            return [hit.id for hit in (await memory.search(SearchRequest(query=query))).hits]

    return asyncio.run(work())


# -- on one server


def test_the_first_start_prints_a_key_that_works(served: Place) -> None:
    said = (served.directory / "serve.out").read_text()
    info = served.ready()
    keys = set(KEY.findall(said))
    assert len(keys) == 1
    assert info.url in said
    assert f"claude mcp add --transport http warmstart {info.url}/mcp" in said
    for line in [line for line in said.splitlines() if line.startswith("  curl ")]:
        answer = subprocess.run(line, shell=True, capture_output=True, text=True, check=True).stdout  # noqa: S602
        assert "heron" in answer
    assert keys.isdisjoint(KEY.findall((served.directory / "serve.err").read_text()))


def test_the_local_key_is_in_a_private_file_and_no_other(served: Place) -> None:
    info = served.ready()
    assert stat.S_IMODE((served.home.path / "server.json").stat().st_mode) == 0o600
    holding = [
        path.name
        for path in [*served.home.path.iterdir(), *served.directory.glob("serve.*")]
        if path.is_file() and info.api_key in path.read_text(errors="replace")
    ]
    assert holding == ["server.json"]


def test_commands_save_find_and_delete(served: Place) -> None:
    content = "  The release train leaves on Thursdays.\n"
    saved = served.json("save", "-", "--tag", "release", "--metadata", '{"ticket": 7}', stdin=content)
    assert (saved["content"], saved["duplicate"], saved["source"]) == (content, False, "cli")
    memory_id = saved["id"]
    assert served.json("save", content)["duplicate"] is True
    found = served.json("search", "release", "train", "--tag", "release", "--type", "fact")
    assert [hit["id"] for hit in found["hits"]] == [memory_id]
    assert "Thursdays" in served.run_apart("search", "train").stdout
    assert served.json("get", memory_id)["metadata"] == {"ticket": 7}
    assert "Thursdays" in served.run("context", "when does the release train leave?").stdout

    assert served.json("delete", memory_id)["deleted"] is True
    assert [m["id"] for m in served.json("list", "--trash")["memories"]] == [memory_id]
    assert served.json("counts")["trashed"] == 1
    assert "deleted_at" not in served.json("restore", memory_id)
    served.json("namespaces", "rename", "default", "trains")
    names = served.json("namespaces", "list")["namespaces"]
    assert "trains" in [n["name"] for n in names]
    first = served.json("list", "--limit", "1")
    assert len(first["memories"]) == 1
    every = served.json("list", "--limit", "1", "--all")
    assert memory_id in [m["id"] for m in every["memories"]]
    assert every["next_cursor"] is None

    assert served.json("delete", memory_id, "--hard", "--yes")["hard"] is True
    problem = served.json("get", memory_id, code=3)["error"]
    assert problem["type"].endswith("/not-found")
    human = served.run("get", memory_id)
    assert (human.exit_code, human.stdout) == (3, "")
    assert human.stderr.startswith("Error: ")


def test_wrong_keys_and_servers_have_their_own_exit_codes(served: Place) -> None:
    url = served.ready().url
    wrong = {"WARMSTART_URL": url, "WARMSTART_API_KEY": "ws_sk_" + "x" * 43}
    assert "API key" in served.json("counts", code=6, **wrong)["error"]["detail"]
    nobody = {"WARMSTART_URL": f"http://127.0.0.1:{free_port()}", "WARMSTART_API_KEY": "ws_sk_" + "x" * 43}
    assert "nothing answers" in served.json("counts", code=5, **nobody)["error"]["detail"]
    assert "WARMSTART_API_KEY" in served.run("counts", WARMSTART_URL=url).stderr


def test_keys_and_tenants_beside_a_running_server(served: Place) -> None:
    served.json("tenants", "create", "second")
    assert served.run("tenants", "create", "second").exit_code == 4
    key = served.run("keys", "create", "laptop", "--tenant", "second").stdout.strip()
    assert KEY.fullmatch(key)
    by_key = {"WARMSTART_URL": served.ready().url, "WARMSTART_API_KEY": key}
    assert served.json("counts", **by_key)["active"] == 0  # another tenant's memories are not counted
    listed = served.json("keys", "list", "--tenant", "second")["keys"]
    assert [(k["name"], k["state"]) for k in listed] == [("laptop", "active")]
    assert key not in json.dumps(listed)
    assert served.json("keys", "revoke", listed[0]["id"])["recorded"] == "database"
    assert until(lambda: served.run("counts", **by_key).exit_code == 6, 10)
    assert served.run("keys", "create", "x", "--tenant", "nobody").exit_code == 3


def test_a_key_is_revoked_though_postgres_hangs(served: Place) -> None:
    key = served.run("keys", "create", "lost").stdout.strip()
    by_key = {"WARMSTART_URL": served.ready().url, "WARMSTART_API_KEY": key}
    assert served.run("counts", **by_key).exit_code == 0
    # the snapshot names a key once the server has written it there
    key_id = next(k["id"] for k in served.json("keys", "list")["keys"] if k["name"] == "lost")
    assert until(lambda: key_id in (served.home.path / "keys.json").read_text(), 10)
    frozen = EmbeddedPostgres(served.home.path / "postgres").processes()
    assert frozen
    try:
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        assert served.json("keys", "revoke", key)["recorded"] == "snapshot"
        assert until(lambda: served.run("counts", **by_key).exit_code == 6, 10)
    finally:
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)


def test_a_hook_gives_a_prompt_what_the_home_knows(served: Place) -> None:
    served.json("save", "The harbour crane is oiled on Mondays.", "--namespace", "harbour")
    # the hook as it is, with the patience that a busy machine needs
    patient = "import sys; from warmstart import hooks; hooks.LIMIT_S = 4.5; hooks.main(sys.argv[1:])"
    event = {"hook_event_name": "UserPromptSubmit", "session_id": "s", "prompt": "when is the harbour crane oiled?"}
    for expected in ("## Prior observations from warmstart\n\nThe harbour crane is oiled on Mondays.", ""):
        done = subprocess.run(
            [sys.executable, "-c", patient, "prompt"],
            input=json.dumps(event), env=served.environ, capture_output=True, text=True, timeout=START_S, check=True,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == (expected, "")


def test_doctor_finds_it_well(served: Place) -> None:
    until(lambda: served.run("health").exit_code == 0, 15)
    report = served.json("doctor")
    assert [check["name"] for check in report["checks"]] == [
        "settings", "home", "disk", "server", "key", "version", "parts",
        "mcp over http", "mcp over stdio", "round trip", "agents", "hook",
    ]  # fmt: skip
    assert report["ok"] is True, report
    assert {c["name"]: c["detail"] for c in report["checks"]}["mcp over stdio"] == "8 tools"
    assert not [n for n in served.json("namespaces", "list")["namespaces"] if n["name"].startswith("doctor")]


def test_a_second_start_on_the_same_home_is_refused(served: Place) -> None:
    info = served.ready()
    second = served.run_apart("serve")
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert f"pid {info.pid}, {info.url}" in second.stderr
    assert served.home.server() == info


def test_a_port_that_a_server_has_is_busy_for_another_home(served: Place, tmp_path: Path) -> None:
    port = served.ready().url.rpartition(":")[2]
    second = served.run_apart("serve", "--port", port, WARMSTART_HOME=str(tmp_path / "other"))
    assert second.returncode == 1
    assert f"port {port}" in second.stderr
    assert not (tmp_path / "other").exists()
    assert served.run("healthcheck", PORT=port).exit_code == 0


# -- from start to end


def test_ctrl_c_ends_all_of_it_and_a_second_start_keeps_the_data(place: Place) -> None:
    server = place.serve()
    memory_id = save(place.ready(), "The heron database has the staging data.")
    children = descendants(server.pid)
    assert len(children) > 3
    os.killpg(server.pid, signal.SIGINT)
    assert server.wait(STOP_S) == 0, place.said()
    assert not alive(children)
    assert not (place.home.path / "server.json").exists()
    assert "Traceback" not in place.said()

    # with no server, the database is started for the command
    assert [k["name"] for k in place.json("keys", "list")["keys"]] == ["first"]

    # and killed, it takes nothing with it
    server = place.serve()
    info = place.ready()
    assert not KEY.search((place.directory / "serve.out").read_text())
    assert "warmstart keys create" in place.said()
    assert found_by(info, "staging") == [memory_id]
    other = save(info, "The ibis database has the production data.")
    children = descendants(server.pid)
    server.kill()
    server.wait()
    assert until(lambda: not alive(children), STOP_S), alive(children)
    assert place.home.server() is None
    assert (place.home.path / "server.json").exists()  # stale, and passed over

    server = place.serve(EMBEDDING_ENABLED="False")
    assert found_by(place.ready(), "production") == [other]


def test_a_signal_while_it_starts_ends_it_cleanly(place: Place) -> None:
    server = place.serve()
    # while initdb is at work, or just after it on a machine that gave this process no time
    assert until(lambda: list((place.home.path / "postgres").glob("data*")), START_S)
    children = descendants(server.pid)
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait(STOP_S) == 0, place.said()
    assert not alive(children)
    assert "Traceback" not in place.said()
    assert place.home.holder() is None


def test_it_ends_when_unused(place: Place) -> None:
    server = place.serve("--idle-exit", "3", EMBEDDING_ENABLED="False")
    info = place.ready()
    began = time.monotonic()
    while time.monotonic() - began < 4:  # used, so it stays
        save(info, f"It is {time.monotonic()}.")
        time.sleep(0.5)
    assert server.poll() is None
    ended = time.monotonic()
    while server.poll() is None:  # asking without a key is no use
        place.run("healthcheck", info.url)
        time.sleep(0.2)
        assert time.monotonic() - ended < 3 + STOP_S
    assert server.returncode == 0
    assert time.monotonic() - ended > 2


def test_ten_clients_at_once_start_one_server(place: Place) -> None:
    place.environ["EMBEDDING_ENABLED"] = "False"
    place.environ["DATABASE_URL"] = "postgresql://nobody@127.0.0.1:1/theirs"  # of the project one works in
    probe = "from warmstart.home import connect; print(*connect())"

    def attach(_: int) -> str:
        done = subprocess.run([sys.executable, "-c", probe], env=place.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with ThreadPoolExecutor(10) as clients:
        answers = set(clients.map(attach, range(10)))
    assert len(answers) == 1
    info = place.home.server()
    assert info is not None
    assert not [path for path in place.home.logs.iterdir() if KEY.search(path.read_text())]

    # a session over stdio survives the end of the server that it found
    with mcp_session(place) as ask:
        ask("memory_save", content="The staging database is called heron.")
        os.kill(info.pid, signal.SIGTERM)
        assert until(lambda: place.home.holder() is None, STOP_S)
        assert "heron" in str(ask("memory_search", query="staging"))
        again = place.home.server()
        assert again is not None
        assert again.pid != info.pid

    # nobody was shown a key yet, so the first start that somebody sees makes one
    os.kill(again.pid, signal.SIGTERM)
    assert until(lambda: place.home.holder() is None, STOP_S)
    del place.environ["DATABASE_URL"]
    place.serve()
    place.ready()
    assert KEY.search((place.directory / "serve.out").read_text())


def test_api_and_worker_as_processes_of_their_own(place: Place) -> None:
    place.serve("--no-worker")
    info = place.ready()
    memory_id = save_unembedded(info, "The heron database has the staging data.")
    worker = subprocess.Popen([*WARMSTART, "worker"], env=place.environ, stderr=subprocess.DEVNULL)
    try:
        assert until(lambda: place.json("get", memory_id)["embedding_status"] == "ready", START_S)
    finally:
        worker.terminate()
        assert worker.wait(STOP_S) == 0
    assert place.run_apart("worker", "--retry-failed").stdout == "0 memories queued again\n"

    # with a database of its own an API makes no key, tells nobody one, and may run twice on a home
    dsn = running_dsn(place.home.path / "postgres")
    assert dsn
    port = str(free_port())
    second = place.serve("--port", port, DATABASE_URL=dsn, EMBEDDING_ENABLED="False")
    assert until(lambda: f"running at http://127.0.0.1:{port}" in place.said(), START_S), place.said()
    assert not KEY.search(place.said())
    assert place.home.server() == info
    other = ServerInfo(f"http://127.0.0.1:{port}", second.pid, "", "", place.run("keys", "create").stdout.strip())
    assert found_by(other, "heron") == [memory_id]
    second.terminate()
    assert second.wait(STOP_S) == 0
    assert place.home.server() == info


class mcp_session:
    """`warmstart mcp` and a client's side of it; every line it prints must be JSON-RPC."""

    def __init__(self, place: Place) -> None:
        self._process = subprocess.Popen(
            [*WARMSTART, "mcp"], env=place.environ | {"WARMSTART_LOG_LEVEL": "debug"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._id = 0

    def __enter__(self) -> Callable[..., Any]:
        client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        assert self._request("initialize", client)["serverInfo"]["name"] == "warmstart"
        self._send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        return self._call

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(STOP_S) == 0
        self._process.stdout.close()

    def _call(self, tool: str, **arguments: str) -> Any:
        result = self._request("tools/call", {"name": tool, "arguments": arguments})
        assert not result.get("isError"), result
        return result

    def _request(self, method: str, params: dict[str, Any]) -> Any:
        self._id += 1
        self._send({"jsonrpc": "2.0", "id": self._id, "method": method, "params": params})
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        assert answer["id"] == self._id
        return answer["result"]

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
