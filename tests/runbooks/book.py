"""A runbook as a document that can be run: its sections, and in them the commands with the output they give.

    # name
    ## Meaning … ## Impact … ## Check … ## Act … ## Verify … ## Undo

A command is a ```sh block, followed by the ```text block with its output. A ```python block is what the reader puts
into the inventory. In an output, a line `…` stands for lines left out, `…` in a line for the rest of it or a part, and
holes for what differs each time: `<time>`, `<id>`, `<n>`. A hole with a name before it, such as `<key-id>`, is also
kept: later commands that have it are run with what was found. What else a command has in angle brackets, such as
`<host>`, the reader knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).resolve().parents[2] / "runbooks"
SECTIONS: Final = ("Meaning", "Impact", "Check", "Act", "Verify", "Undo")
#: At the top of a runbook whose fault no test can bring about.
NOT_RUN: Final = re.compile(r"^> Not run by a test: (.+)$", re.MULTILINE)
ALERTS: Final = re.compile(r"^Alerts?: (`\w+`(?:, `\w+`)*)\.", re.MULTILINE)
_FENCE: Final = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_PLACE: Final = re.compile(r"<([a-z]+(?:-[a-z]+)*)>")
#: What a hole may stand for. Times and sizes have their unit behind a blank.
KINDS: Final = {"time": r"\S.*?", "id": r"[\w.:@/+=-]+", "n": r"[\d.,]+"}


class BookError(Exception):
    """A runbook that is not of this form."""


@dataclass(frozen=True)
class Step:
    section: str
    #: Of its first line in the file.
    line: int
    #: `sh`, or `python`: fields of the inventory.
    kind: str
    text: str
    #: None for what goes into the inventory.
    output: str | None = None

    def filled(self, values: Mapping[str, str]) -> str:
        """The text with what the reader, or an earlier output, has for its places. Raises BookError."""
        if unknown := [name for name in _PLACE.findall(self.text) if name not in values]:
            raise BookError(f"line {self.line}: nobody knows <{unknown[0]}>")
        return _PLACE.sub(lambda found: values[found[1]], self.text)


@dataclass(frozen=True)
class Book:
    name: str
    text: str
    steps: tuple[Step, ...]

    def of(self, section: str) -> list[Step]:
        return [step for step in self.steps if step.section == section]

    @property
    def not_run(self) -> str:
        """Why its fault can't be brought about in a test; empty where it can."""
        found = NOT_RUN.search(self.text)
        return found[1] if found else ""

    @property
    def alerts(self) -> list[str]:
        found = ALERTS.search(self.text)
        return re.findall(r"\w+", found[1]) if found else []


def books() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "README")


def read(name: str) -> Book:
    return parse(name, (FOLDER / f"{name}.md").read_text())


def parse(name: str, text: str) -> Book:
    """Raises BookError with all that is not as it should be."""
    headings = re.findall(r"^(#+) (.*)$", _FENCE.sub("", text), re.MULTILINE)
    wanted = [("#", name), *(("##", section) for section in SECTIONS)]
    if headings != wanted:
        raise BookError(f"{name}: its headings are {headings}, and have to be {wanted}")
    steps: list[Step] = []
    faults: list[str] = []
    waiting: Step | None = None
    for section, line, language, body in _blocks(text):
        if language == "text":
            if waiting is None:
                faults.append(f"line {line}: an output without its command")
            else:
                steps.append(Step(waiting.section, waiting.line, "sh", waiting.text, body))
            waiting = None
            continue
        if waiting is not None:
            faults.append(f"line {waiting.line}: a command without its output")
            waiting = None
        if section not in SECTIONS[2:] or (language == "python" and section not in SECTIONS[2:4]):
            faults.append(f"line {line}: no place for {language!r}")
        elif language == "sh":
            waiting = Step(section, line, language, body)
        elif language == "python":
            steps.append(Step(section, line, language, body))
        else:
            faults.append(f"line {line}: a block is sh, text or python, not {language!r}")
    if waiting is not None:
        faults.append(f"line {waiting.line}: a command without its output")
    faults += [f"no command in {section}" for section in SECTIONS[2:5] if not any(s.section == section for s in steps)]
    if faults:
        raise BookError(f"{name}: " + "; ".join(faults))
    return Book(name, text, tuple(steps))


def _blocks(text: str) -> Iterator[tuple[str, int, str, str]]:
    """Section, line, language and body of each fenced block."""
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        section = (re.findall(r"^## (\w+)$", before, re.MULTILINE) or [""])[-1]
        indent = found[1]
        body = re.sub(rf"^{indent}", "", found[3], flags=re.MULTILINE).rstrip("\n")
        yield section, before.count("\n") + 2, found[2], body


# -- outputs


def holes(output: str) -> list[str]:
    return _PLACE.findall(output)


def match(expected: str, got: str, values: Mapping[str, str]) -> dict[str, str] | None:
    """What the named holes stand for, where `got` is what `expected` shows; else None."""
    found = re.fullmatch(_pattern(expected, values), _tidy(got))
    return {name.replace("_", "-"): text for name, text in found.groupdict().items()} if found else None


def _tidy(text: str) -> str:
    """Columns are as wide as their contents, and terminals show no carriage return."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"))
    return "".join(f"{line}\n" for line in lines if line)


def _pattern(expected: str, values: Mapping[str, str]) -> str:
    seen: set[str] = set()
    lines = []
    for line in _tidy(expected).splitlines():
        if line == "…":
            lines.append(r"(?:[^\n]*\n)*?")
            continue
        parts = re.split(r"(…|<[a-z]+(?:-[a-z]+)*>)", line)
        lines.append("".join(_part(part, values, seen) for part in parts) + r"\n")
    return "".join(lines)


def _part(part: str, values: Mapping[str, str], seen: set[str]) -> str:
    if part == "…":
        return r"[^\n]*?"
    place = _PLACE.fullmatch(part)
    if place is None:
        return re.escape(part)
    name = place[1]
    if name in values:
        return re.escape(values[name])
    kind = KINDS.get(name.rpartition("-")[2])
    if kind is None:
        return re.escape(part)
    if name in KINDS:
        return f"(?:{kind})"
    group = name.replace("-", "_")
    if group in seen:
        return f"(?P={group})"
    seen.add(group)
    return f"(?P<{group}>{kind})"
