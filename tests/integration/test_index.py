"""`warmstart index` as people run it, against the real service: its own process, over HTTP, killed at any point."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from starlette.types import Receive, Scope, Send

from integration.service import App, Tenant, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[2]
STATE = ".warmstart/index-state.json"
KEYS = {"files", "symbols", "new", "changed", "gone", "tokens", "seconds"}
#: Memories, as far as they don't depend on when they were made.
SAME = ("type", "title", "content", "facts", "tags", "entities", "importance", "source", "metadata")

#: What the test has the server do with the next requests that a rule names.
Rule = Callable[[Scope], Awaitable[dict[str, Any] | None]]


@dataclass
class Live:
    """The service on a port; `rule` may answer instead of it."""

    url: str
    rule: Rule | None = None


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(app: App) -> AsyncIterator[Live]:
    made = Live("")

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        answer = await made.rule(scope) if made.rule else None
        if answer is None:
            await app.asgi(scope, receive, send)
            return
        while (await receive()).get("more_body"):
            pass
        body = json.dumps(answer["body"]).encode()
        headers = [(b"content-type", b"application/problem+json")]
        await send({"type": "http.response.start", "status": answer["status"], "headers": headers})
        await send({"type": "http.response.body", "body": body})

    server = uvicorn.Server(uvicorn.Config(asgi, port=0, lifespan="off", log_config=None, ws="none"))
    serving = asyncio.create_task(server._serve())

    async def started() -> bool:
        return server.started

    await until(started)
    made.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield made
    server.should_exit = True
    await serving


@pytest.fixture(autouse=True)
def well_behaved(live: Live) -> None:
    live.rule = None


@dataclass
class Run:
    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        return dict(json.loads(self.out.splitlines()[-1]))

    def numbers(self) -> dict[str, Any]:
        return {key: value for key, value in self.told.items() if key != "seconds"}


async def start(live: Live, tenant: Tenant, *arguments: str | Path) -> asyncio.subprocess.Process:
    environ = {
        "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT / "app")),
        "HOME": str(ROOT / ".cache"), "WARMSTART_URL": live.url, "WARMSTART_API_KEY": tenant.key,
    }  # fmt: skip
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "warmstart.cli", "index", *map(str, arguments),
        env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, preexec_fn=hears_ctrl_c,
    )  # fmt: skip


def hears_ctrl_c() -> None:
    """As from a terminal: what a shell runs in the background ignores it, and so would what is started here."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


async def index(live: Live, tenant: Tenant, *arguments: str | Path, code: int = 0) -> Run:
    process = await start(live, tenant, *arguments)
    out, err = await asyncio.wait_for(process.communicate(), 120)
    run = Run(process.returncode or 0, out.decode(), err.decode())
    assert run.code == code, run
    return run


async def memories(tenant: Tenant, namespace: str, **params: Any) -> list[dict[str, Any]]:
    found, cursor = [], {}
    while True:
        page = await tenant.get("/v1/memories", namespace=namespace, limit=200, **params, **cursor)
        found += page["memories"]
        if not page["next_cursor"]:
            return found
        cursor = {"cursor": page["next_cursor"]}


async def shown(tenant: Tenant, namespace: str) -> list[str]:
    """All of a namespace, without ids and times and in one order."""
    rows = await memories(tenant, namespace)
    return sorted(json.dumps({key: row[key] for key in SAME}, sort_keys=True) for row in rows)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def module(number: int, functions: int = 20) -> str:
    return f'"""Module {number}."""\n' + "".join(
        f'\n\ndef step_{number}_{i}(value: int) -> int:\n    """Does {i} of {number}."""\n'
        "    return secret_body(value)\n"
        for i in range(functions)
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """224 symbols, three batches of them."""
    return write(tmp_path / "shop", {
        **{f"src/part_{n}.py": module(n, 4 if n in (1, 2) else 20) for n in range(12)},
        "README.md": "# Shop\n\nSells things.\n\n## Returns\n\nWithin 30 days.\n",
        "src/cart.ts": "/** A cart. */\nexport class Cart {\n  /** Adds. */\n  add(item: Item): void { push(item) }\n}",
    })  # fmt: skip


def change(root: Path) -> None:
    """An edit, a new symbol, a symbol that goes, a file that moves, and one that goes."""
    part = root / "src" / "part_0.py"
    text = part.read_text().replace("Does 3 of 0.", "Does three, and says so.")
    part.write_text("# a line more\n" + text.replace("def step_0_5(", "def step_0_five(") + "\n\ndef fresh(): ...\n")
    (root / "lib").mkdir()
    (root / "src" / "part_1.py").rename(root / "lib" / "moved.py")
    (root / "src" / "part_2.py").unlink()
    write(root, {f"src/more_{n}.py": module(100 + n) for n in range(5)})


async def test_a_repository_is_indexed_once(live: Live, alice: Tenant, repository: Path) -> None:
    first = await index(live, alice, repository, "--json")
    assert set(first.told) == KEYS
    assert first.told | {"tokens": 0, "seconds": 0} == {
        "files": 14, "symbols": 224, "new": 224, "changed": 0, "gone": 0, "tokens": 0, "seconds": 0,
    }  # fmt: skip
    rows = await memories(alice, "code-shop")
    assert len(rows) == 224
    [step] = [row for row in rows if row["metadata"]["name"] == "step_3_7"]
    assert step["title"] == "step_3_7(value: int) -> int"
    assert step["content"] == (
        "def step_3_7(value: int) -> int\nfunction step_3_7 in src/part_3.py\n\nDoes 7 of 3.\n\nCalls: secret_body"
    )
    assert (step["type"], step["source"], step["tags"]) == ("code", "index", ["python"])
    assert {k: step["metadata"][k] for k in ("path", "language", "kind", "line")} == {
        "path": "src/part_3.py", "language": "python", "kind": "function", "line": 39,
    }  # fmt: skip
    assert not any("return secret_body" in row["content"] for row in rows)
    again = await index(live, alice, repository, "--json")
    assert again.numbers() == {**first.numbers(), "new": 0}
    assert await memories(alice, "code-shop") == rows


async def test_a_change_touches_what_changed(live: Live, alice: Tenant, repository: Path) -> None:
    await index(live, alice, repository)
    before = {
        row["metadata"]["path"] + " " + row["metadata"]["name"]: row for row in await memories(alice, "code-shop")
    }
    change(repository)
    plan = (await index(live, alice, repository, "--dry-run")).out
    assert "~ src/part_0.py  step_0_3(value: int) -> int" in plan
    assert "- src/part_2.py  step_2_0" in plan
    told = (await index(live, alice, repository, "--json")).told
    # the renamed function, the new one and five files; the edit and the moved file; the removed file and nothing else
    assert (told["new"], told["changed"], told["gone"]) == (1 + 1 + 5 * 21, 1 + 5, 1 + 5)
    after = {row["metadata"]["path"] + " " + row["metadata"]["name"]: row for row in await memories(alice, "code-shop")}
    edited = after["src/part_0.py step_0_3"]
    assert edited["id"] == before["src/part_0.py step_0_3"]["id"]
    assert "Does three" in edited["content"]
    assert after["lib/moved.py step_1_2"]["id"] == before["src/part_1.py step_1_2"]["id"]
    assert "in lib/moved.py" in after["lib/moved.py step_1_2"]["content"]
    trash = {row["id"] for row in await memories(alice, "code-shop", only_deleted="true")}
    assert trash == {
        row["id"] for key, row in before.items() if key.startswith("src/part_2.py") or key.endswith("step_0_5")
    }
    assert (await index(live, alice, repository, "--json")).numbers() | {"new": 0, "changed": 0, "gone": 0} == {
        key: value for key, value in told.items() if key != "seconds"
    } | {"new": 0, "changed": 0, "gone": 0}


async def test_a_damaged_state_costs_time_only(live: Live, alice: Tenant, repository: Path) -> None:
    await index(live, alice, repository)
    before = await memories(alice, "code-shop")
    state = repository / STATE
    text = state.read_text()
    for damaged in (None, text[: len(text) // 2], "[1, 2]", text.replace('"code-shop"', '"code-other"')):
        if damaged is None:
            shutil.rmtree(repository / ".warmstart")
        else:
            state.write_text(damaged)
        told = (await index(live, alice, repository, "--json")).told
        assert (told["symbols"], told["new"], told["changed"], told["gone"]) == (224, 0, 0, 0)
        assert await memories(alice, "code-shop") == before
        assert json.loads(state.read_text())["namespace"] == "code-shop"


async def test_a_lost_state_and_a_moved_file(live: Live, alice: Tenant, repository: Path) -> None:
    await index(live, alice, repository)
    shutil.rmtree(repository / ".warmstart")
    (repository / "src" / "part_1.py").rename(repository / "moved.py")
    told = (await index(live, alice, repository, "--json")).told
    assert (told["new"], told["changed"], told["gone"]) == (0, 5, 0)


async def test_what_others_did_to_the_memories_is_seen(live: Live, alice: Tenant, repository: Path) -> None:
    await index(live, alice, repository)
    mine = await alice.save("A note of an agent's own.", namespace="code-shop")
    rows = await memories(alice, "code-shop", source="index")
    await alice.delete(f"/v1/memories/{rows[5]['id']}")
    await alice.delete(f"/v1/memories/{rows[6]['id']}", hard="true")
    told = (await index(live, alice, repository, "--json")).told
    assert (told["symbols"], told["new"], told["gone"]) == (224, 2, 0)
    assert len(await memories(alice, "code-shop", source="index")) == 224
    assert (await alice.get(f"/v1/memories/{mine['id']}")).get("deleted_at") is None
    await alice.delete("/v1/namespaces/code-shop", status=200)
    assert (await index(live, alice, repository, "--json")).told["new"] == 224


async def test_another_repository_of_the_same_name_is_refused(live: Live, alice: Tenant, tmp_path: Path) -> None:
    one = write(tmp_path / "shop", {"main.py": module(1, 2)})
    other = write(tmp_path / "elsewhere" / "shop", {"main.py": module(50, 3)})
    await index(live, alice, one)
    run = await index(live, alice, other, code=4)
    assert "--namespace" in run.err
    assert len(await memories(alice, "code-shop")) == 3
    assert (await index(live, alice, other, "--namespace", "code-shop-two", "--json")).told["new"] == 4
    taken = await index(live, alice, other, "--namespace", "code-shop", "--json")
    assert (taken.told["symbols"], taken.told["new"] + taken.told["changed"]) == (4, 4)


async def test_a_dry_run_sends_and_writes_nothing(live: Live, alice: Tenant, repository: Path) -> None:
    async def never(scope: Scope) -> dict[str, Any] | None:
        raise AssertionError(scope["path"])

    live.rule = never
    run = await index(live, alice, repository, "--dry-run", "--json")
    assert (run.told["symbols"], run.told["new"]) == (224, 224)
    assert not (repository / ".warmstart").exists()


async def test_a_rate_limit_is_waited_for(live: Live, alice: Tenant, repository: Path) -> None:
    refused = 0

    async def twice(scope: Scope) -> dict[str, Any] | None:
        nonlocal refused
        if scope["path"] != "/v1/memories/batch" or refused == 2:
            return None
        refused += 1
        return problem(429, "rate-limited", retry_after=1)

    live.rule = twice
    run = await index(live, alice, repository, "--json")
    assert run.told["new"] == 224
    assert run.err.count("Waiting 1 s") == 2


async def test_a_server_that_stays_away_is_said_and_the_next_run_goes_on(
    live: Live, alice: Tenant, repository: Path
) -> None:
    batches = 0

    async def after_one(scope: Scope) -> dict[str, Any] | None:
        nonlocal batches
        batches += scope["path"] == "/v1/memories/batch"
        return problem(507, "disk-full") if batches > 1 else None

    live.rule = after_one
    run = await index(live, alice, repository, code=1)
    assert "run the same command again" in run.err
    assert len(json.loads((repository / STATE).read_text())["symbols"]) > 0
    live.rule = None
    told = (await index(live, alice, repository, "--json")).told
    assert (told["symbols"], told["new"]) == (224, 124)


def problem(status: int, kind: str, **extra: Any) -> dict[str, Any]:
    body = {"type": f"https://warmstart.invalid/problems/{kind}", "title": "No", "status": status, "detail": "not now"}
    return {"status": status, "body": body | extra}


async def test_ctrl_c_keeps_what_was_acknowledged(live: Live, alice: Tenant, repository: Path) -> None:
    async def slow(scope: Scope) -> dict[str, Any] | None:
        if scope["path"] == "/v1/memories/batch" and (repository / STATE).exists():
            reached.set()
            await asyncio.sleep(30)
        return None

    reached = asyncio.Event()
    live.rule = slow
    process = await start(live, alice, repository)
    await asyncio.wait_for(reached.wait(), 60)
    process.send_signal(signal.SIGINT)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130
    assert "again to go on" in err.decode()
    live.rule = None
    assert (await index(live, alice, repository, "--json")).told["new"] < 224


async def test_two_runs_at_once_are_one(live: Live, alice: Tenant, repository: Path) -> None:
    runs = [await start(live, alice, repository, "--json") for _ in range(3)]
    await asyncio.gather(*(run.communicate() for run in runs))
    assert sorted({run.returncode for run in runs} - {4}) == [0]
    assert len(await memories(alice, "code-shop")) == 224


@dataclass
class Killer:
    """Kills a run at its `at`th request: before it is done, while it is, or after."""

    at: int
    delay_s: float
    victim: asyncio.subprocess.Process | None = None
    requests: int = 0

    async def __call__(self, scope: Scope) -> dict[str, Any] | None:
        self.requests += 1
        if self.requests == self.at:
            asyncio.get_running_loop().call_later(self.delay_s, self.kill)
            if not self.delay_s:
                await asyncio.sleep(0)
        return None

    def kill(self) -> None:
        if self.victim and self.victim.returncode is None:
            self.victim.kill()


async def killed_at_random(live: Live, tenant: Tenant, repository: Path, times: int, seed: int) -> None:
    """Kills runs, each somewhere between its first request and its last; what is left must be as if nothing was."""
    random_ = random.Random(seed)
    killed = 0
    for number in range(times):
        if number == times // 2:
            change(repository)
        live.rule = killer = Killer(random_.randint(1, 12), random_.choice([0.0, 0.01, 0.05]))
        killer.victim = await start(live, tenant, repository)
        await asyncio.wait_for(killer.victim.communicate(), 120)
        live.rule = None
        killed += killer.victim.returncode == -signal.SIGKILL
        if (state := repository / STATE).exists():
            json.loads(state.read_text())
    assert killed > 0


async def is_as_undisturbed(live: Live, tenant: Tenant, other: Tenant, repository: Path) -> None:
    await index(live, tenant, repository)
    shutil.rmtree(repository / ".warmstart")
    await index(live, other, repository)
    found = await shown(tenant, "code-shop")
    assert len(found) == len(set(found))
    assert [without_line(row) for row in found] == [without_line(row) for row in await shown(other, "code-shop")]


def without_line(row: str) -> dict[str, Any]:
    """The line is that of the last change."""
    plain = json.loads(row)
    del plain["metadata"]["line"]
    return dict(plain)


async def test_kills_leave_no_trace(live: Live, alice: Tenant, bob: Tenant, repository: Path) -> None:
    await killed_at_random(live, alice, repository, 3, seed=1)
    await is_as_undisturbed(live, alice, bob, repository)


@pytest.mark.slow
async def test_many_kills_leave_no_trace(live: Live, alice: Tenant, bob: Tenant, repository: Path) -> None:
    await killed_at_random(live, alice, repository, 15, seed=2)
    await is_as_undisturbed(live, alice, bob, repository)
