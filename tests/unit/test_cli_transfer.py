"""`warmstart export` and `warmstart import` against a server on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fakes.memory_api import KEY, FakeRuntime, InMemoryAPI
from fakes.web import listening
from warmstart.cli import main, transfer
from warmstart.errors import Invalid, Overloaded
from warmstart.exchange import ExportedMemory, Format, ImportResult
from warmstart.importers import own
from warmstart.memory import NewMemory


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[FakeRuntime, str]]:
    runtime = FakeRuntime()
    with listening(runtime) as url:
        yield runtime, url


@pytest.fixture
def api(server: tuple[FakeRuntime, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> InMemoryAPI:
    runtime, url = server
    runtime.reset()
    monkeypatch.setenv("WARMSTART_URL", url)
    monkeypatch.setenv("WARMSTART_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return runtime.service("alice")


def fill(api: InMemoryAPI, count: int = 3) -> None:
    for number in range(count):
        asyncio.run(api.save(NewMemory(content=f"memory {number}")))


def run(*arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def told(result: Result, code: int = 0) -> dict[str, Any]:
    assert result.exit_code == code, result.output
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", ["out.ndjson", "out.json"])
def test_out_to_a_file_and_back(api: InMemoryAPI, name: str) -> None:
    fill(api)
    before = dict(api.rows)
    done = told(run("export", name, "--json"))
    assert done == {
        "file": name, "format": name[4:], "memories": 3, "bytes": Path(name).stat().st_size,
    }  # fmt: skip
    assert Path(name).stat().st_mode & 0o077 == 0
    assert [n for n in os.listdir() if n != ".warmstart"] == [name]
    api.rows.clear()
    assert told(run("import", name, "--dry-run", "--json"))["memories"] == 3
    assert not api.rows
    assert told(run("import", name, "--json"))["created"] == 3
    assert {i: r.content for i, r in api.rows.items()} == {i: r.content for i, r in before.items()}
    assert told(run("import", name, "--json"))["unchanged"] == 3
    assert "3 were there already" in run("import", name).stdout


def test_stdout_and_stdin(api: InMemoryAPI) -> None:
    fill(api)
    result = run("export")
    assert result.exit_code == 0
    assert len(result.stdout_bytes.splitlines()) == 4
    assert told(run("import", "-", "--json", stdin=result.stdout_bytes))["unchanged"] == 3
    assert run("export", "--json").exit_code == 2


def test_a_file_is_never_overwritten_unasked(api: InMemoryAPI, tmp_path: Path) -> None:
    fill(api)
    target = tmp_path / "kept.ndjson"
    target.write_text("precious")
    refused = run("export", str(target))
    assert (refused.exit_code, target.read_text()) == (2, "precious")
    assert "--force" in refused.stderr
    assert run("export", str(target), "--force").exit_code == 0
    assert target.read_bytes().count(b"\n") == 4
    assert run("export", str(tmp_path / "no" / "such" / "x.json")).exit_code == 1


def test_an_export_that_is_cut_short_leaves_no_file(
    api: InMemoryAPI, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill(api)
    whole = InMemoryAPI.export

    async def short(self: InMemoryAPI, form: Format) -> AsyncIterator[bytes]:
        async for chunk in whole(self, form):
            yield chunk[:-80]

    monkeypatch.setattr(InMemoryAPI, "export", short)
    target = tmp_path / "old.ndjson"
    target.write_text("the last good one")
    for form in ("ndjson", "json"):
        result = run("export", str(target), "--force", "--format", form)
        assert result.exit_code == 5, result.output
        assert "cut short" in result.stderr
        assert target.read_text() == "the last good one"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".old")]


def test_a_bad_line_is_named_as_in_the_file(api: InMemoryAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(api, 7)
    assert run("export", "x.ndjson").exit_code == 0
    lines = Path("x.ndjson").read_bytes().splitlines(keepends=True)
    lines[6] = lines[6].replace(b'"importance": 0.5', b'"importance": 7')
    Path("x.ndjson").write_bytes(b"".join(lines))
    api.rows.clear()
    monkeypatch.setattr(own, "_CHUNK_MEMORIES", 2)
    result = run("import", "x.ndjson")
    assert result.exit_code == 2
    assert "line 7, importance" in result.stderr
    assert len(api.rows) == 4
    error = told(run("import", "x.ndjson", "--json"), 2)["error"]
    assert error["detail"].startswith("line 7: importance")
    assert "4 of 7 memories are done" in error["detail"]
    Path("x.json").write_bytes(lines[0][:-2] + b', "memories": [' + b",".join(lines[1:]) + b"]}")
    assert told(run("import", "x.json", "--json"), 2)["error"]["detail"].startswith("memory 6: importance")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected an export"),
        (b"nonsense", "expected an export"),
        (b'{"schema": "warmstart/export/9", "count": 0}\n', "warmstart/export/9"),
        (b'{"schema": "warmstart/export/1"}\n', "exported-at"),
        (b'{"schema":"warmstart/export/1","exported_at":"2026-01-01T00:00:00Z","count":2}\n', "0 memories of 2"),
        (b'{"schema":"warmstart/export/1","exported_at":"2026-01-01T00:00:00Z","count":1,"memories":[', "cut short"),
        (b'{"memories": [], "schema": "warmstart/export/1"}', "expected an export"),
        (b"\xff\xfe", "expected an export"),
    ],
)
def test_what_is_no_export_or_only_a_part(api: InMemoryAPI, content: bytes, words: str) -> None:
    Path("given").write_bytes(content)
    for options in ((), ("--dry-run",)):
        result = run("import", "given", *options)
        assert result.exit_code == 2, result.output
        assert words in result.stderr


def test_a_server_that_is_busy_is_asked_again(api: InMemoryAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(api)
    assert run("export", "x.ndjson").exit_code == 0
    whole, calls = InMemoryAPI.import_memories, []

    async def busy(self: InMemoryAPI, memories: list[ExportedMemory]) -> ImportResult:
        calls.append(len(memories))
        if len(calls) < 3:
            raise Overloaded("too many", retry_after=1)
        return await whole(self, memories)

    monkeypatch.setattr(InMemoryAPI, "import_memories", busy)
    monkeypatch.setattr(transfer, "LONGEST_WAIT_S", 0.01)
    assert told(run("import", "x.ndjson", "--json"))["unchanged"] == 3
    assert calls == [3, 3, 3]
    monkeypatch.setattr(transfer, "TRIES", 2)
    calls.clear()
    result = run("import", "x.ndjson")
    assert (result.exit_code, len(calls)) == (5, 2)
    assert "run the same command again" in result.stderr


def test_from_elsewhere(api: InMemoryAPI, tmp_path: Path) -> None:
    (tmp_path / "AGENTS.md").write_text("# Tests\nRun make test.\n\n# Nothing\n")
    assert told(run("import", "--from", "agent-files", "AGENTS.md", "--dry-run", "--json"))["created"] == 1
    assert not api.rows
    done = told(run("import", "--from", "agent-files", "AGENTS.md", "-n", "rules", "--json"))
    assert (done["created"], done["not_carried"]) == (1, {"headings with nothing below them": 1})
    [row] = api.rows.values()
    assert (row.namespace, row.source) == ("rules", "agent-files")
    again = run("import", "--from", "agent-files", "AGENTS.md", "-n", "rules")
    assert "0 memories imported\n1 are known" in again.stdout
    assert run("import", "--from", "agent-files", "AGENTS.md", "-n", "No Such").exit_code == 2
    assert run("import", "--from", "basic-memory", "AGENTS.md").exit_code == 2
    assert run("import", "AGENTS.md", "-n", "x").exit_code == 2


def test_json_is_read_piece_by_piece(tmp_path: Path) -> None:
    memory = {"id": "x", "text": "y" * 1_000}
    head = b'{"schema":"warmstart/export/1","exported_at":"2026-01-01T00:00:00Z","count":1300,"memories":['
    path = tmp_path / "one-line.json"
    path.write_bytes(head + b",".join([json.dumps(memory).encode()] * 1_300) + b"]}")
    with path.open("rb") as file:
        chunks = list(own.read(file).chunks)
    assert [c.memories for c in chunks] == [500, 500, 300]
    assert [c.first for c in chunks] == [1, 501, 1001]
    with pytest.raises(Invalid):
        own.count_in(b"{}")
