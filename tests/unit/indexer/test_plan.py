from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from warmstart.indexer.assemble import Wanted, shape
from warmstart.indexer.plan import Plan, plan
from warmstart.indexer.state import Row
from warmstart.memory import NewMemory


def content(path: str, name: str, text: str) -> str:
    return f"{name} in {path}: {text}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def row(path: str, name: str, text: str) -> Row:
    whole = content(path, name, text)
    return Row(path, name, digest(whole), shape(whole, path), 1)


def wanted(path: str, name: str, text: str) -> Wanted:
    whole = content(path, name, text)
    return Wanted(path, name, 1, NewMemory(content=whole), digest(whole), shape(whole, path), 1)


def ids(made: Plan) -> dict[str, list[str]]:
    return {
        "kept": [p.memory_id for p in made.kept], "changed": [p.memory_id for p in made.changed],
        "new": [w.name for w in made.new], "gone": [i for i, _ in made.gone],
    }  # fmt: skip


def test_kept_changed_new_and_gone() -> None:
    rows = {"1": row("a.py", "f", "x"), "2": row("a.py", "g", "x"), "3": row("a.py", "h", "x")}
    made = plan(rows, [wanted("a.py", "f", "x"), wanted("a.py", "g", "y"), wanted("a.py", "new", "z")], {})
    assert ids(made) == {"kept": ["1"], "changed": ["2"], "new": ["new"], "gone": ["3"]}


def test_a_renamed_file_moves_also_what_two_files_have_alike() -> None:
    rows = {"1": row("a.py", "f", "x"), "2": row("b.py", "f", "x")}
    made = plan(rows, [wanted("c.py", "f", "x"), wanted("d.py", "f", "x")], {"c.py": "b.py", "d.py": "a.py"})
    assert {(p.memory_id, p.wanted.path) for p in made.changed} == {("2", "c.py"), ("1", "d.py")}


def test_a_moved_symbol_keeps_its_memory() -> None:
    made = plan({"1": row("a.py", "f", "x")}, [wanted("b.py", "f", "x")], {})
    assert ids(made) == {"kept": [], "changed": ["1"], "new": [], "gone": []}


PLACES = st.tuples(st.sampled_from(["a.py", "b.py"]), st.sampled_from(["f", "g", "f#2"]))
TREES = st.dictionaries(PLACES, st.sampled_from(["x", "y", "z"]), max_size=6)


@given(TREES, TREES)
def test_every_plan_leads_there_and_never_makes_two_of_one_content(before: dict, after: dict) -> None:  # type: ignore[type-arg]
    rows = {f"{path} {name}": row(path, name, text) for (path, name), text in before.items()}
    goal = [wanted(path, name, text) for (path, name), text in after.items()]
    made = plan(rows, goal, {})
    state = {memory_id: known.content_hash for memory_id, known in rows.items()}
    for pair in made.changed:
        assert pair.wanted.content_hash not in state.values()
        state[pair.memory_id] = pair.wanted.content_hash
    for memory_id, _ in made.gone:
        del state[memory_id]
    for one in made.new:
        assert one.content_hash not in state.values()
        state[f"new {one.path} {one.name}"] = one.content_hash
    assert sorted(state.values()) == sorted(one.content_hash for one in goal)
    assert len(made.kept) == len({known.content_hash for known in rows.values()} & {one.content_hash for one in goal})
