"""The form of one memory: fields as text, and back to what was changed.

With each field the form carries a digest of what it showed. So it is known, when it comes back, which fields the
person changed and, against the memory as it is by then, which somebody else did.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from warmstart.errors import Invalid
from warmstart.memory import MAX_CONTENT, MAX_TITLE, MEMORY_TYPES, Memory, MemoryPatch, Version, parse

if TYPE_CHECKING:
    from warmstart.web.dashboard.view import Visit

Kind = Literal["line", "text", "lines", "choice", "number", "json"]


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    label: str
    kind: Kind
    hint: str = ""
    most: int | None = None


SPECS: Final = (
    Spec("title", "Title", "line", "Left empty: the first line of the text.", MAX_TITLE),
    Spec("content", "Text", "text", "Markdown, up to 8,000 characters.", MAX_CONTENT),
    Spec("namespace", "Namespace", "line", "Small letters, digits, dot, dash, underscore.", 64),
    Spec("type", "Type", "choice"),
    Spec("tags", "Tags", "lines", "One a line, up to 20."),
    Spec("facts", "Facts", "lines", "Short statements, one a line, up to 20."),
    Spec("entities", "Entities", "lines", "People, services, files, functions: one a line."),
    Spec("importance", "Importance", "number", "From 0 to 1."),
    Spec("source", "Source", "line", "Who wrote it.", 200),
    Spec("metadata", "Metadata", "json", "A JSON object."),
)


@dataclass(slots=True)
class Field:
    spec: Spec
    value: str
    #: The digest of what was shown when the form was first given out.
    seen: str
    problem: str = ""

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(slots=True)
class Difference:
    """A field that is otherwise than the form showed it: theirs is stored now."""

    label: str
    theirs: str
    yours: str
    #: Both changed it: what is in the form is yours.
    clash: bool
    #: Only others changed it: what is in the form is theirs.
    taken: bool


@dataclass(slots=True)
class MemoryForm:
    etag: str
    fields: list[Field] = field(default_factory=list)

    @property
    def problems(self) -> list[Field]:
        return [f for f in self.fields if f.problem]

    def blame(self, problem: Invalid) -> bool:
        """Puts the faults beside their fields; whether each was of one."""
        faults = problem.extra.get("errors") or [{"field": problem.extra.get("field", ""), "problem": problem.detail}]
        by_name = {f.name: f for f in self.fields}
        found = [by_name.get(str(fault["field"]).partition(".")[0]) for fault in faults]
        for at, fault in zip(found, faults, strict=True):
            if at is not None:
                entry = str(fault["field"]).partition(".")[2]
                at.problem = (f"line {int(entry) + 1} " if entry.isdigit() else "") + str(fault["problem"])
        return all(found)


def texts_of(memory: Memory | Version) -> dict[str, str]:
    """Each field as the form shows it."""
    found = {}
    for spec in SPECS:
        value: Any = getattr(memory, spec.name)
        if spec.kind == "lines":
            value = "\n".join(value)
        elif spec.kind == "json":
            value = json.dumps(value, ensure_ascii=False, indent=2) if value else ""
        elif spec.kind == "number":
            value = f"{value:g}"
        found[spec.name] = _as_browsers_send(value, spec)
    return found


def blank(memory: Memory) -> MemoryForm:
    """The form as it is first given out."""
    return MemoryForm(
        memory.etag, [Field(s, t, digest(t)) for s, t in zip(SPECS, texts_of(memory).values(), strict=True)]
    )


def filled(visit: Visit) -> MemoryForm:
    """The form as it came back."""
    fields = [Field(s, _as_browsers_send(visit.field(s.name), s), visit.field(f"seen.{s.name}")) for s in SPECS]
    return MemoryForm(visit.field("etag"), fields)


def patch_of(form: MemoryForm, title_of: Any) -> MemoryPatch | None:
    """What the person changed, or None; Invalid names the fields at fault."""
    changed = {f.name: f for f in form.fields if digest(f.value) != f.seen}
    values = {name: _value(changed[name]) for name in changed}
    if values.get("title") == "":
        values["title"] = title_of(next(f.value for f in form.fields if f.name == "content"))
    return parse(MemoryPatch, values) if values else None


def merge(form: MemoryForm, now: Memory) -> list[Difference]:
    """Brings `form` up to `now`: what only others changed is taken over, what the person changed stays and is named.

    Answers what is different from what the form first showed, or from what the person wants.
    """
    differences = []
    for f, theirs in zip(form.fields, texts_of(now).values(), strict=True):
        touched, moved = digest(f.value) != f.seen, digest(theirs) != f.seen
        if moved or touched:
            if f.value != theirs:
                differences.append(Difference(f.spec.label, theirs, f.value, touched and moved, not touched))
            if not touched:
                f.value = theirs
        f.seen = digest(theirs)
    form.etag = now.etag
    return differences


def digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:20]


def _as_browsers_send(text: str, spec: Spec) -> str:
    """As `text` comes back untouched: line ends are one kind, and a field of one line has none."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text.replace("\n", "") if spec.kind == "line" else text


def _value(f: Field) -> Any:
    if f.spec.kind == "lines":
        return [line.strip() for line in f.value.split("\n") if line.strip()]
    if f.spec.kind == "number":
        try:
            return float(f.value)
        except ValueError:
            raise _invalid(f, "must be a number from 0 to 1") from None
    if f.spec.kind == "json":
        try:
            value = json.loads(f.value or "{}")
        except (ValueError, RecursionError):
            raise _invalid(f, 'must be JSON, such as {"ticket": "OPS-17"}') from None
        if not isinstance(value, dict):
            raise _invalid(f, "must be a JSON object, in braces")
        return value
    if f.spec.kind == "choice" and f.value not in MEMORY_TYPES:
        raise _invalid(f, f"must be one of {', '.join(MEMORY_TYPES)}")
    return f.value


def _invalid(f: Field, problem: str) -> Invalid:
    return Invalid(
        f"{f.name}: {problem}", field=f.name, errors=[{"field": f.name, "problem": problem, "fault": "value"}]
    )
