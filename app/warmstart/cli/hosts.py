"""The coding agents that can be set up: which file each reads, and what of it is ours.

An edit is a function from a file's text to its new text, so that it can be shown before anything is written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from warmstart.errors import WarmstartError

NAME: Final = "warmstart"
#: Seconds a host gives the hook; it needs 0.6 itself.
HOOK_TIMEOUT_S: Final = 5
#: Events of Claude Code, and what the hook is called with.
CLAUDE_HOOKS: Final = {"UserPromptSubmit": "prompt", "SessionEnd": "session-end"}
#: Passed on to the server's command, where they are set.
PASSED_ON: Final = ("WARMSTART_URL", "WARMSTART_API_KEY", "WARMSTART_HOME")

_BY_HAND: Final = '"warmstart": {"type": "stdio", "command": "warmstart", "args": ["mcp"]}'

Edit = Callable[[str, Path], str]


class Unreadable(WarmstartError):
    """A configuration file that is left alone, since it can't be read as what it should be."""


@dataclass(frozen=True, slots=True)
class Change:
    """A file of a host, and how it becomes what it should be."""

    path: Path
    install: Edit
    remove: Edit


def hosts(environ: Mapping[str, str], home: Path) -> dict[str, Change]:
    """The file with the MCP servers of each host."""
    claude = Path(environ["CLAUDE_CONFIG_DIR"]) if environ.get("CLAUDE_CONFIG_DIR") else home
    codex = Path(environ["CODEX_HOME"]) if environ.get("CODEX_HOME") else home / ".codex"
    user = "Library/Application Support/Code/User" if sys.platform == "darwin" else ".config/Code/User"
    stanza = _stanza(environ)
    return {
        "claude-code": _json_server(claude / ".claude.json", "mcpServers", stanza),
        "cursor": _json_server(home / ".cursor" / "mcp.json", "mcpServers", stanza),
        "vscode": _json_server(home / user / "mcp.json", "servers", stanza),
        "codex": _toml_server(codex / "config.toml", stanza),
    }


def claude_hooks(environ: Mapping[str, str], home: Path) -> Change:
    """Claude Code's hooks; of these four it alone adds to a prompt what a hook prints."""
    directory = Path(environ["CLAUDE_CONFIG_DIR"]) if environ.get("CLAUDE_CONFIG_DIR") else home / ".claude"
    return Change(directory / "settings.json", _with_hooks, _without_hooks)


def command() -> list[str]:
    """What starts this program from anywhere."""
    beside = Path(sys.executable).parent / NAME
    if beside.exists():
        return [str(beside)]
    found = shutil.which(NAME)
    return [found] if found else [sys.executable, "-P", "-m", "warmstart.cli"]


def has_hooks(text: str) -> bool:
    return _without_hooks(text, Path()) != text


def _stanza(environ: Mapping[str, str]) -> dict[str, Any]:
    program, *arguments = command()
    stanza: dict[str, Any] = {"type": "stdio", "command": program, "args": [*arguments, "mcp"]}
    if passed := {name: environ[name] for name in PASSED_ON if environ.get(name)}:
        stanza["env"] = passed
    return stanza


# -- JSON


def _json_server(path: Path, section: str, stanza: dict[str, Any]) -> Change:
    def install(text: str, path: Path) -> str:
        document = _parsed(text, path)
        _section(document, section, path)[NAME] = stanza
        return text if document == _parsed(text, path) else _dumped(document, text)

    def remove(text: str, path: Path) -> str:
        document = _parsed(text, path)
        servers = document.get(section)
        if not isinstance(servers, dict) or NAME not in servers:
            return text
        del servers[NAME]
        if not servers:
            del document[section]
        return _dumped(document, text)

    return Change(path, install, remove)


def _with_hooks(text: str, path: Path) -> str:
    document = _parsed(_without_hooks(text, path), path)
    hooks = _section(document, "hooks", path)
    for event, name in CLAUDE_HOOKS.items():
        entries = hooks.setdefault(event, [])
        if not isinstance(entries, list):
            raise Unreadable(f"{path}: hooks.{event} is no list: mend that, then try again")
        run = " ".join([*map(shlex.quote, command()), "hook", name])
        entries.append({"hooks": [{"type": "command", "command": run, "timeout": HOOK_TIMEOUT_S}]})
    return text if document == _parsed(text, path) else _dumped(document, text)


def _without_hooks(text: str, path: Path) -> str:
    document = _parsed(text, path)
    hooks = document.get("hooks")
    if not isinstance(hooks, dict):
        return text
    found = False
    for event in CLAUDE_HOOKS:
        entries = hooks.get(event)
        if not isinstance(entries, list):
            continue
        others = [entry for entry in entries if not _is_ours(entry)]
        found = found or len(others) < len(entries)
        if others:
            hooks[event] = others
        elif entries:
            del hooks[event]
    if found and not hooks:
        del document["hooks"]
    return _dumped(document, text) if found else text


def _is_ours(entry: Any) -> bool:
    runs = entry.get("hooks") if isinstance(entry, dict) else None
    commands = [str(run.get("command", "")) for run in runs or () if isinstance(run, dict)]
    return len(commands) == 1 and bool(re.search(rf"{NAME}\S* hook (prompt|session-end)$", commands[0]))


def _section(document: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    section = document.setdefault(name, {})
    if not isinstance(section, dict):
        raise Unreadable(f"{path}: {name} is no object: mend that, then try again")
    return section


def _parsed(text: str, path: Path) -> dict[str, Any]:
    if not text.strip("\ufeff \t\r\n"):
        return {}
    try:
        document = json.loads(text.removeprefix("\ufeff"), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip()[:80] if text.splitlines() else ""
        comment = " (a comment would be lost)" if re.match(r"//|/\*", line) else ""
        raise Unreadable(
            f"{path} is left alone: line {error.lineno}, column {error.colno} is no JSON{comment}: "
            f"{error.msg}: {line!r}: mend that line, or add these by hand: {_BY_HAND}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} is left alone: {error}: mend that, then try again") from None
    if not isinstance(document, dict):
        raise Unreadable(f"{path} is left alone: it holds no JSON object: mend that, then try again")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice in one object")
    return values


def _dumped(document: dict[str, Any], before: str) -> str:
    """As JSON, indented as it was `before`."""
    found = re.search(r"^[\[{]\r?\n([ \t]+)", before.removeprefix("\ufeff").lstrip())
    text = json.dumps(document, ensure_ascii=False, indent=found[1] if found else 2)
    mark = "\ufeff" if before.startswith("\ufeff") else ""
    end = "\n" if before.endswith("\n") or not before.strip() else ""
    return (mark + text + end).replace("\n", "\r\n" if "\r\n" in before else "\n")


# -- TOML


def _toml_server(path: Path, stanza: dict[str, Any]) -> Change:
    def install(text: str, path: Path) -> str:
        import tomlkit

        document = _toml(text, path)
        if document.get("mcp_servers", {}).get(NAME) == _plain(stanza):
            return text
        servers = document.setdefault("mcp_servers", tomlkit.table(is_super_table=True))
        if not isinstance(servers, dict):
            raise Unreadable(f"{path}: mcp_servers is no table: mend that, then try again")
        servers[NAME] = _plain(stanza)
        return tomlkit.dumps(document)

    def remove(text: str, path: Path) -> str:
        import tomlkit

        document = _toml(text, path)
        servers = document.get("mcp_servers")
        if not isinstance(servers, dict) or NAME not in servers:
            return text
        del servers[NAME]
        if not servers:
            del document["mcp_servers"]
        return tomlkit.dumps(document)

    return Change(path, install, remove)


def _plain(stanza: dict[str, Any]) -> dict[str, Any]:
    """Without the type, which Codex tells by the command."""
    return {name: value for name, value in stanza.items() if name != "type"}


def _toml(text: str, path: Path) -> Any:
    import tomlkit
    from tomlkit.exceptions import ParseError

    try:
        return tomlkit.parse(text)
    except ParseError as error:
        raise Unreadable(f"{path} is left alone: it is no TOML: {error}: mend that line, then try again") from None


# -- the file


def read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path} is left alone: byte {error.start} is not UTF-8: mend that, then try again") from None


def backup_of(path: Path) -> Path:
    return path.with_name(path.name + ".before-warmstart")


def write(path: Path, text: str, before: str) -> None:
    """By rename, so that a reader sees all of it or none; the text `before` is kept beside it.

    Raises Unreadable where the file is no longer as it was read.
    """
    real = Path(os.path.realpath(path))  # a link into somebody's dotfiles stays one
    real.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if read(real) != before:
        raise Unreadable(f"{path} changed meanwhile: try again")
    mode = real.stat().st_mode & 0o777 if real.exists() else 0o600
    if real.exists() and not backup_of(real).exists():
        _write(backup_of(real), before, mode)
    _write(real, text, mode)


def undo(path: Path, text: str, before: str) -> None:
    """Writes `text`, or what was there before the installation where that means the same.

    No file where there was none.
    """
    real = Path(os.path.realpath(path))
    backup = backup_of(real)
    kept = read(backup) if backup.exists() else None
    if kept is not None and _same(kept, text):
        text = kept
    if read(real) != before:
        raise Unreadable(f"{path} changed meanwhile: try again")
    if kept is None and text.strip() in ("", "{}"):
        real.unlink(missing_ok=True)
    else:
        _write(real, text, real.stat().st_mode & 0o777)
    backup.unlink(missing_ok=True)


def _same(first: str, second: str) -> bool:
    try:
        return bool(json.loads(first) == json.loads(second))
    except ValueError:
        return first.strip() == second.strip()


def _write(path: Path, text: str, mode: int) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(
            os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8", newline=""
        ) as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
