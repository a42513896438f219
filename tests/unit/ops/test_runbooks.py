"""The form of the runbooks, that what they name exists, and the runner's own way of reading and comparing.

That they are true is shown on a machine: tests/vm/test_runbooks.py.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import yaml

from ops.cli import main as ops_program
from ops.inventory import Target
from ops.vm.__main__ import COMMANDS
from runbooks import book, index, play
from runbooks.book import FOLDER, SECTIONS, Book, BookError, books, match, parse, read
from runbooks.play import Lied, Reader
from warmstart.cli import main as program

ROOT = FOLDER.parent
MAX_MEDIAN_LINES = 60
MAX_LINES = 100
#: At most so many may be without a fault in a test.
MAX_NOT_RUN = 2
#: Of the mission: tasks and faults that have to have a page.
WANTED = {
    "migrate-embedding-dimension", "change-embedding-provider", "restore-from-backup", "move-to-another-vm",
    "disk-full", "log-flood", "search-degraded", "embedding-queue-stuck", "redis-lost", "postgres-unreachable",
    "lancedb-compaction-lag", "lancedb-corrupt-version", "rotate-secrets-and-keys", "delete-a-tenant",
    "upgrade-and-rollback", "load-test-before-release",
}  # fmt: skip
TARGETS = set(
    re.findall(r"^([a-z-]+):", "".join(f.read_text() for f in (ROOT / "Makefile", *ROOT.glob("*/targets.mk"))), re.M)
)
SERVICES = {
    service
    for name in ("compose.yml", "compose.monitoring.yml")
    for service in yaml.safe_load((ROOT / "compose" / name).read_text())["services"]
}
#: Of Debian, on every machine.
REMOTE_PROGRAMS = {
    "chown", "df", "docker", "du", "find", "journalctl", "nft", "ps", "rm", "sh", "ss", "systemctl", "tar",
    "warmstart-vm",
}  # fmt: skip
LOCAL_PROGRAMS = {"find", "git", "grep", "head", "make", "sort", "tail", "tr", "true", "uniq"}


# -- form


@pytest.mark.parametrize("name", books())
def test_a_runbook_has_the_form_that_can_be_run(name: str) -> None:
    page = read(name)
    parts = re.split(rf"^## (?:{'|'.join(SECTIONS)})$", page.text, flags=re.MULTILINE)[1:]
    assert all(len(part.strip()) >= len("Nothing to undo.") for part in parts)
    assert len(page.text.splitlines()) <= MAX_LINES


def test_they_are_short() -> None:
    lines = [len(read(name).text.splitlines()) for name in books()]
    assert statistics.median(lines) < MAX_MEDIAN_LINES


def test_what_has_to_have_a_page_has_one() -> None:
    assert set(books()) >= WANTED


def test_nearly_all_can_be_brought_about() -> None:
    from runbooks.faults import FAULTS

    not_run = {name for name in books() if read(name).not_run}
    assert len(not_run) <= MAX_NOT_RUN
    assert FAULTS.keys() == set(books()) - not_run


@pytest.mark.parametrize("name", [*books(), "README"])
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\((.+?)\)", (FOLDER / f"{name}.md").read_text()):
        assert (FOLDER / link).is_file(), link


@pytest.mark.parametrize("name", books())
def test_holes_are_for_times_ids_and_counts(name: str) -> None:
    steps = read(name).steps
    # what the reader puts into a command, such as the name of the machine
    given = {hole for step in steps for hole in book.holes(step.text)} | {"host"}
    for step in steps:
        for hole in book.holes(step.output or ""):
            assert hole.rpartition("-")[2] in book.KINDS or hole in given, f"line {step.line}: <{hole}>"


# -- what they name


def lines(page: Book) -> list[str]:
    return [line for step in page.steps if step.kind == "sh" for line in step.text.splitlines()]


def inline(page: Book) -> list[str]:
    """Commands in the text itself."""
    return re.findall(r"`(make [^`]+)`", page.text)


@pytest.mark.parametrize("name", books())
def test_a_command_is_one_that_exists(name: str) -> None:
    page = read(name)
    for line in [*lines(page), *inline(page)]:
        for quoted in re.findall(r'CMD="([^"]+)"', line):
            first, *words = quoted.split()
            assert first in REMOTE_PROGRAMS, first
            if first == "warmstart-vm":
                assert words[0] in COMMANDS
        bare = re.sub(r'"[^"]*"', '""', line)
        for part in re.split(r"&&|\|\||\|", bare):
            words = [word for word in part.split() if not word.startswith("-")]
            assert words[0] in LOCAL_PROGRAMS, part
            if words[0] == "make":
                assert next(word for word in words[1:] if "=" not in word) in TARGETS
        if service := re.search(r"SERVICE=([a-z-]+)", line):
            assert service[1] in SERVICES
        for container in re.findall(r"warmstart-([a-z-]+)-1\b", line):
            assert container in SERVICES
        if words := re.search(r'make warmstart ARGS="(\S+)', line):
            assert isinstance(program, click.Group)
            assert words[1] in program.list_commands(click.Context(program))


def test_what_goes_into_the_inventory_is_a_field_of_it() -> None:
    for name in books():
        for step in read(name).steps:
            if step.kind == "python":
                assert set(eval(f"{{{step.text}}}")) <= set(Target.model_fields), name  # noqa: S307


def test_each_command_of_an_operator_is_a_target() -> None:
    assert isinstance(ops_program, click.Group)
    assert set(ops_program.commands) <= TARGETS


# -- the index


def test_the_index_has_each_runbook_by_what_is_seen() -> None:
    found = index.rows()
    assert {name for _, name, _ in found} == set(books())
    assert len({symptom for symptom, _, _ in found}) == len(found)


def test_the_index_says_how_long_each_took() -> None:
    for _, name, took in index.rows():
        if read(name).not_run:
            assert took == "not run"
        else:
            assert re.fullmatch(r"(\d+ (s|min))?", took), name  # empty: not measured yet


def test_a_time_is_written_into_the_rows_of_its_runbook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "README.md"
    path.write_text("| a | [one](one.md) | |\n| b | [two](two.md) | 3 s |\n| c | [one](one.md) | 9 s |\n")
    monkeypatch.setattr(index, "PATH", path)
    index.write_time("one", 61.4)
    index.write_time("two", 185.0)
    assert path.read_text() == (
        "| a | [one](one.md) | 61 s |\n| b | [two](two.md) | 3 min |\n| c | [one](one.md) | 61 s |\n"
    )


# -- the runner

PAGE = """\
# lamp-out

## Meaning
Alerts: `LampOut`, `LampDim`. It is dark.

## Impact
Nobody sees.

## Check
1. Look.
   ```sh
   cat lamp
   ```
   ```text
   the lamp is out since <time>
   ```

## Act
```sh
echo on > lamp && date +%s >> log
```
```text
```

## Verify
```sh
cat lamp
```
```text
on
```

## Undo
Nothing.
"""


def reader(folder: Path) -> Reader:
    return Reader(folder, {"PATH": "/usr/bin:/bin"}, {}, lambda block: None, patience_s=0.0, say=lambda line: None)


def test_a_page_is_played_as_printed_and_twice(tmp_path: Path) -> None:
    (tmp_path / "lamp").write_text("the lamp is out since Monday, 3 p.m.\n")
    page = parse("lamp-out", PAGE)
    assert page.alerts == ["LampOut", "LampDim"]
    play.play(page, reader(tmp_path))
    assert len((tmp_path / "log").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("before", "page", "reason"),
    [
        ("on\n", PAGE, "printed"),
        ("the lamp is out since Monday\n", PAGE.replace("echo on", "echo off"), "printed"),
        ("the lamp is out since Monday\n", PAGE.replace("echo on", "false"), "ended with 1"),
        (
            "the lamp is out since Monday\n",
            PAGE.replace("\n```\n\n## Verify", "\nlit\n```\n\n## Verify"),
            "ended with 0",
        ),
        ("the lamp is out since Monday\n", PAGE.replace("\non\n", "\n…\n"), "holds before Act"),
    ],
)
def test_a_page_that_lies_is_told(tmp_path: Path, before: str, page: str, reason: str) -> None:
    (tmp_path / "lamp").write_text(before)
    with pytest.raises(Lied, match=reason):
        play.play(parse("lamp-out", page), reader(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text.replace("## Impact", "## Effect"), "headings"),
        (lambda text: text.replace("# lamp-out", "# Lamp"), "headings"),
        (lambda text: text.replace("```text\non\n```\n", ""), "without its output"),
        (lambda text: text.replace("## Undo\n", "## Undo\n```text\nx\n```\n"), "without its command"),
        (lambda text: text.replace("```sh\ncat lamp\n```\n```text\non\n```\n", "On?\n"), "no command in Verify"),
        (lambda text: text.replace("Nobody sees.", "```sh\nls\n```\n```text\n```"), "no place"),
        (lambda text: text.replace("```sh\necho", "```bash\necho"), "not 'bash'"),
    ],
)
def test_another_form_is_refused(change: Callable[[str], str], reason: str) -> None:
    with pytest.raises(BookError, match=reason):
        parse("lamp-out", change(PAGE))


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        ("up <n> of <n>", "up 3 of 1,024.5\n", {}),
        ("a   b", "a b  \n", {}),
        ("a\n…\nc", "a\nb1\nb2\nc\n", {}),
        ("a\n…\nc", "a\nc\n", {}),
        ("key <key-id> of <id>", "key k_1 of ann@laptop\n", {"key-id": "k_1"}),
        ("<key-id> is <key-id>", "k is k\n", {"key-id": "k"}),
        ('…"event": "x"…', '{"event": "x", "n": 1}\n', {}),
        ("{{.State}} (1) *", "{{.State}} (1) *\n", {}),
        ("for <time>, ok", "for 3 h 2 min, ok\n", {}),
        ("", "\n", {}),
        # not so
        ("up <n>", "up three\n", None),
        ("a\nc", "a\nb\nc\n", None),
        ("a", "a\nb\n", None),
        ("<key-id> is <key-id>", "k is j\n", None),
        ("key <id>", "key a b\n", None),
        ("", "something\n", None),
    ],
)
def test_outputs_are_compared_but_for_their_holes(expected: str, got: str, found: dict[str, str] | None) -> None:
    assert match(expected, got, {}) == found


def test_what_is_known_is_compared_and_put_into_commands() -> None:
    values = {"key-id": "k_1", "host": "vm"}
    assert match("<key-id> on <host>", "k_1 on vm\n", values) == {}
    assert match("<key-id> on <host>", "k_2 on vm\n", values) is None
    step = parse("lamp-out", PAGE.replace("cat lamp\n   ", "cat <key-id>\n   ")).steps[0]
    assert step.filled(values) == "cat k_1"
    with pytest.raises(BookError, match="nobody knows <key-id>"):
        step.filled({})


def test_sections_are_those_of_the_readme() -> None:
    assert SECTIONS == ("Meaning", "Impact", "Check", "Act", "Verify", "Undo")
