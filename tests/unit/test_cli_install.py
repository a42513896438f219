"""What `warmstart install` does to the configuration of other people's programs."""

from __future__ import annotations

import json
import os
import stat
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from warmstart.cli import hosts, main

USER = ".config/Code/User" if sys.platform != "darwin" else "Library/Application Support/Code/User"
FILES = {
    "claude-code": ".claude.json",
    "cursor": ".cursor/mcp.json",
    "vscode": ".config/Code/User/mcp.json"
    if sys.platform != "darwin"
    else "Library/Application Support/Code/User/mcp.json",
    "codex": ".codex/config.toml",
}
SECTIONS = {"claude-code": "mcpServers", "cursor": "mcpServers", "vscode": "servers", "codex": "mcp_servers"}
HOOKS = ".claude/settings.json"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "WARMSTART_URL", "WARMSTART_API_KEY", "WARMSTART_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def install(*arguments: str, code: int = 0, input: str | None = None) -> Result:
    result = CliRunner().invoke(main, ["install", *arguments], input=input)
    assert result.exit_code == code, result.output
    return result


def content(path: Path) -> Any:
    return tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())


def put(home: Path, name: str, text: str) -> Path:
    path = home / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


def files(home: Path) -> set[str]:
    return {str(p.relative_to(home)) for p in home.rglob("*") if not p.is_dir()}


@pytest.mark.parametrize("host", FILES)
def test_the_stanza_goes_into_the_hosts_own_file(home: Path, host: str) -> None:
    install(host, "--yes")
    path = home / FILES[host]
    stanza = content(path)[SECTIONS[host]]["warmstart"]
    assert Path(stanza["command"]).is_absolute()
    assert stanza["args"][-1] == "mcp"
    assert stanza.get("type") == (None if host == "codex" else "stdio")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert files(home) == {FILES[host]}


@pytest.mark.parametrize("host", FILES)
def test_again_changes_nothing_and_undo_leaves_nothing(home: Path, host: str) -> None:
    install(host, "--yes")
    before = (home / FILES[host]).read_bytes()
    assert "nothing to change" in install(host).output
    assert (home / FILES[host]).read_bytes() == before
    install(host, "--undo", "--yes")
    assert files(home) == set()
    assert "nothing to change" in install(host, "--undo").output


JSON_BEFORE = '{\n\t"z": [1, 2],\n\t"ü": "é",\n\t"SECTION": {"other": {"command": "x"}},\n\t"a": null\n}'
TOML_BEFORE = '# mine\nmodel = "m"   # this one\n\n[mcp_servers.other]\ncommand = "x"\n\n[tui]\ntheme = "dark"\n'


@pytest.mark.parametrize("host", FILES)
def test_what_was_there_stays_and_comes_back_byte_for_byte(home: Path, host: str) -> None:
    text = TOML_BEFORE if host == "codex" else JSON_BEFORE.replace("SECTION", SECTIONS[host])
    path = put(home, FILES[host], text)
    path.chmod(0o640)
    had = content(path)
    install(host, "--yes")
    has = content(path)
    assert list(has) == list(had), "in the same order"
    assert has[SECTIONS[host]].pop("warmstart")
    assert has == had
    after = path.read_text()
    if host == "codex":
        assert '# mine\nmodel = "m"   # this one\n' in after
    else:
        assert '\n\t"z"' in after, "indented as before"
        assert "ü" in after
        assert not after.endswith("\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert hosts.backup_of(path).read_text() == text
    install(host, "--undo", "--yes")
    assert path.read_text() == text
    assert files(home) == {FILES[host]}


def test_undo_keeps_what_was_changed_since(home: Path) -> None:
    path = put(home, ".cursor/mcp.json", '{"mcpServers": {"other": {"command": "x"}}}')
    install("cursor", "--yes")
    changed = content(path)
    changed["mcpServers"]["third"] = {"command": "y"}
    path.write_text(json.dumps(changed))
    install("cursor", "--undo", "--yes")
    assert content(path) == {"mcpServers": {"other": {"command": "x"}, "third": {"command": "y"}}}


def test_hooks_only_where_asked_for_beside_those_that_are_there(home: Path) -> None:
    mine = {"hooks": [{"type": "command", "command": "my-linter"}]}
    path = put(home, HOOKS, json.dumps({"model": "m", "hooks": {"UserPromptSubmit": [mine], "Stop": [mine]}}))
    before = path.read_bytes()
    install("claude-code", "--yes")
    assert path.read_bytes() == before
    install("claude-code", "--hooks", "--yes")
    hooks = content(path)["hooks"]
    assert hooks["UserPromptSubmit"][0] == mine
    assert hooks["Stop"] == [mine]
    [ours] = hooks["UserPromptSubmit"][1]["hooks"]
    assert ours["command"].endswith("warmstart hook prompt") or "warmstart.cli hook prompt" in ours["command"]
    assert hooks["SessionEnd"][0]["hooks"][0]["command"].endswith("hook session-end")
    assert hosts.has_hooks(path.read_text())
    once = path.read_bytes()
    assert "nothing to change" in install("claude-code", "--hooks").output
    assert path.read_bytes() == once
    install("claude-code", "--undo", "--yes")
    assert path.read_bytes() == before


def test_hooks_of_an_older_place_are_replaced(home: Path) -> None:
    old = {"hooks": [{"type": "command", "command": "/old/bin/warmstart hook prompt", "timeout": 5}]}
    path = put(home, HOOKS, json.dumps({"hooks": {"UserPromptSubmit": [old]}}))
    install("claude-code", "--hooks", "--yes")
    [entry] = content(path)["hooks"]["UserPromptSubmit"]
    assert "/old/" not in json.dumps(entry)


@pytest.mark.parametrize("host", ["cursor", "vscode", "codex"])
def test_hooks_are_refused_where_a_prompt_can_not_be_added_to(home: Path, host: str) -> None:
    assert "leave --hooks out" in install(host, "--hooks", "--yes", code=2).output
    assert files(home) == set()


def test_the_difference_is_shown_and_nothing_written_without_a_yes(home: Path) -> None:
    result = install("cursor", code=2)
    assert '+    "warmstart": {' in result.output
    assert "--yes" in result.output
    assert files(home) == set()


def test_a_server_elsewhere_and_its_key_which_is_not_shown(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "ws_sk_" + "k" * 43
    monkeypatch.setenv("WARMSTART_URL", "https://memory.example.com")
    monkeypatch.setenv("WARMSTART_API_KEY", key)
    result = install("claude-code", "--hooks", "--yes")
    assert key not in result.output
    stanza = content(home / ".claude.json")["mcpServers"]["warmstart"]
    assert stanza["env"] == {"WARMSTART_URL": "https://memory.example.com", "WARMSTART_API_KEY": key}
    assert key not in (home / HOOKS).read_text()
    assert stat.S_IMODE((home / ".claude.json").stat().st_mode) == 0o600


BROKEN = {
    '{"a": 1,\n  "b": }': "line 2",
    '{\n  // mine\n  "a": 1\n}': "a comment would be lost",
    '{"a": 1, "a": 2}': "twice",
    "[]": "no JSON object",
    '{"mcpServers": []}': "mcpServers is no object",
    "[" * 100_000: "left alone",
}


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_file_that_can_not_be_read_is_left_alone(home: Path, text: str) -> None:
    path = put(home, ".cursor/mcp.json", text)
    result = install("cursor", "--yes", code=1)
    assert BROKEN[text] in result.output
    assert str(path) in result.output.replace("\n", "")
    assert path.read_text() == text
    assert files(home) == {".cursor/mcp.json"}


def test_broken_toml_and_other_encodings_are_left_alone(home: Path) -> None:
    put(home, ".codex/config.toml", "a = 1\nb = = 2\n")
    assert "line 2" in install("codex", "--yes", code=1).output
    (home / ".cursor").mkdir()
    (home / ".cursor/mcp.json").write_bytes(b"\xff\xfe{\x00}\x00")
    assert "not UTF-8" in install("cursor", "--yes", code=1).output


def test_crlf_and_a_byte_order_mark_stay(home: Path) -> None:
    path = put(home, ".cursor/mcp.json", '\ufeff{\r\n  "a": 1\r\n}\r\n')
    install("cursor", "--yes")
    data = path.read_bytes()
    assert data.startswith(b"\xef\xbb\xbf{\r\n")
    assert data.count(b"\n") == data.count(b"\r\n")


def test_a_link_into_dotfiles_stays_a_link(home: Path) -> None:
    real = put(home, "dotfiles/mcp.json", "{}")
    (home / ".cursor").mkdir()
    (home / ".cursor/mcp.json").symlink_to(real)
    install("cursor", "--yes")
    assert (home / ".cursor/mcp.json").is_symlink()
    assert "warmstart" in content(real)["mcpServers"]


def test_what_changed_meanwhile_is_not_written_over(home: Path) -> None:
    path = put(home, ".cursor/mcp.json", "{}")
    with pytest.raises(hosts.Unreadable, match="changed meanwhile"):
        hosts.write(path, "new", before="other")
    assert path.read_text() == "{}"


def test_the_hosts_own_variables_are_followed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAUDE_CONFIG_DIR", str(home / "cc"))
    monkeypatch.setenv("CODEX_HOME", str(home / "cx"))
    install("claude-code", "--hooks", "--yes")
    install("codex", "--yes")
    assert files(home) == {"cc/.claude.json", "cc/settings.json", "cx/config.toml"}


def test_json_says_what_was_done(home: Path) -> None:
    told = json.loads(install("claude-code", "--hooks", "--yes", "--json").stdout.splitlines()[-1])
    assert told["installed"] is True
    assert {Path(f["path"]).name: f["changed"] for f in told["files"]} == {".claude.json": True, "settings.json": True}


def test_a_folder_that_can_not_be_written_leaves_no_half_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(home, ".cursor/mcp.json", "{}")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        hosts.write(path, "new", "{}")
    assert path.read_text() == "{}"
    assert files(home) == {".cursor/mcp.json"}
