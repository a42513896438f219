"""Any sequence of what tenants do, against a plain model of what they should see."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fakes.store import DIM, Store, etag, open_store, row
from warmstart.errors import Conflict, Duplicate, Expired, NotFound, Problem, Stale
from warmstart.memory import ListRequest
from warmstart.store import predicates as where
from warmstart.store.changes import Vector
from warmstart.store.reads import Inspector, filters_of_list
from warmstart.store.schema import Row, content_hash, now, title_of

T = TypeVar("T")
ACTIVE = [where.active()]
NOTHING = object()

#: The word each content is found by; few contents, so that duplicates happen.
WORDS = {
    "zebra it's": "zebra",
    "otter \\' OR 1=1 --": "otter",
    "walrus') OR (user_id > '": "walrus",
    "giraffe\nsecond 'line'\\": "giraffe",
    "naïve café": "cafe",
    "日本語 データベース": "データベース",
    '😀 panda "quoted"': "panda",
}
contents = st.sampled_from(sorted(WORDS))
users = st.sampled_from(["alice", "x\\') OR (1=1) --"])
namespaces = st.sampled_from(["default", "one", "two"])
tags = st.lists(st.sampled_from(["'", "\\'", "a b", "日本", "--"]), max_size=2, unique=True)


def vector_of(content: str) -> list[float]:
    return [float(b) + 1 for b in bytes.fromhex(content_hash(content))[:DIM]]


class StoreMachine(RuleBasedStateMachine):
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp())
        self.opened = open_store(self.directory)
        self.store: Store = self.run(self.opened.__aenter__())
        #: id → what the row should be.
        self.model: dict[str, Row] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def attempt(self, work: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self.run(work)
        except Problem as problem:
            return problem

    def teardown(self) -> None:
        self.run(self.opened.__aexit__(None, None, None))
        self.runner.close()
        shutil.rmtree(self.directory)

    # -- the model

    def own(self, user: str, *, deleted: bool | None = False) -> list[Row]:
        """A tenant's rows, newest first."""
        rows = [
            r for r in self.model.values()
            if r["user_id"] == user and deleted in (None, r["deleted_at"] is not None)
        ]  # fmt: skip
        rows.sort(key=lambda r: r["id"])
        rows.sort(key=lambda r: r["created_at"], reverse=True)
        return rows

    def active_twin(self, user: str, namespace: str, content: str, but: str = "") -> str | None:
        for r in self.own(user):
            if (r["namespace"], r["content"]) == (namespace, content) and r["id"] != but:
                return str(r["id"])
        return None

    def seen(self, user: str, memory_id: str) -> Row | None:
        found = self.model.get(memory_id)
        return found if found and found["user_id"] == user else None

    # -- what tenants do

    @rule(
        target=ids,
        user=users,
        items=st.lists(st.tuples(contents, namespaces, tags, st.booleans()), min_size=1, max_size=3),
    )
    def save(self, user: str, items: list[tuple[str, str, list[str], bool]]) -> Any:
        rows = [
            row(c, user_id=user, namespace=n, tags=t, importance=len(t) / 3, vector=vector_of(c) if v else None)
            for c, n, t, v in items
        ]
        answers = self.run(self.store.writer.insert(rows))
        for made, answer in zip(rows, answers, strict=True):
            twin = self.active_twin(user, made["namespace"], made["content"])
            assert answer.duplicate == (twin is not None)
            assert answer.id == (twin or made["id"])
            if twin is None:
                self.model[made["id"]] = made
        return multiple(*(a.id for a in answers))

    @rule(
        user=users,
        memory_id=ids,
        content=st.none() | contents,
        namespace=st.none() | namespaces,
        new_tags=st.none() | tags,
        match=st.sampled_from(["none", "right", "stale"]),
    )
    def edit(
        self,
        user: str,
        memory_id: str,
        content: str | None,
        namespace: str | None,
        new_tags: list[str] | None,
        match: str,
    ) -> None:
        given = {"content": content, "namespace": namespace, "tags": new_tags}
        values = {k: v for k, v in given.items() if v is not None}
        before = self.seen(user, memory_id)
        if_match = {"none": None, "right": etag(before) if before else None, "stale": '"0"'}[match]
        answer = self.attempt(self.store.tenant(user).edit(memory_id, values, if_match, etag))
        if before is None:
            assert isinstance(answer, NotFound)
        elif before["deleted_at"] is not None:
            assert isinstance(answer, Conflict)
        elif match == "stale":
            assert isinstance(answer, Stale)
        else:
            after = before | values
            moved = (after["content"], after["namespace"]) != (before["content"], before["namespace"])
            twin = self.active_twin(user, after["namespace"], after["content"], but=memory_id)
            if moved and twin:
                assert isinstance(answer, Duplicate)
                assert answer.extra["id"] == twin
                return
            if after["content"] != before["content"]:
                after |= {"embedding_status": "queued", "embedding": None, "title": title_of(after["content"])}
                after["content_hash"] = content_hash(after["content"])
            changed = any(after[k] != before[k] for k in values)
            assert (etag(answer) != etag(before)) == changed
            self.model[memory_id] = after | {"updated_at": answer["updated_at"]}

    @rule(user=users, memory_id=ids)
    def delete(self, user: str, memory_id: str) -> None:
        before = self.seen(user, memory_id)
        answer = self.attempt(self.store.tenant(user).delete(memory_id, None, etag))
        if before is None:
            assert isinstance(answer, NotFound)
            return
        self.model[memory_id] = before | {k: answer[k] for k in ("deleted_at", "expires_at", "updated_at")}
        assert answer["expires_at"] == answer["deleted_at"] + timedelta(days=30)

    @rule(user=users, memory_id=ids)
    def delete_for_good(self, user: str, memory_id: str) -> None:
        answer = self.attempt(self.store.tenant(user).delete_for_good(memory_id, None, etag))
        assert isinstance(answer, NotFound) == (self.seen(user, memory_id) is None)
        if answer is None:
            del self.model[memory_id]

    @rule(user=users, memory_id=ids)
    def restore(self, user: str, memory_id: str) -> None:
        before = self.seen(user, memory_id)
        answer = self.attempt(self.store.tenant(user).restore(memory_id))
        if before is None:
            assert isinstance(answer, NotFound)
        elif before["deleted_at"] is None:
            assert answer["id"] == memory_id
        elif before["expires_at"] <= now():
            assert isinstance(answer, Expired)
        elif twin := self.active_twin(user, before["namespace"], before["content"]):
            assert isinstance(answer, Duplicate)
            assert answer.extra["id"] == twin
        else:
            self.model[memory_id] = before | {
                "deleted_at": None, "expires_at": None, "updated_at": answer["updated_at"],
            }  # fmt: skip

    @rule(user=users, name=namespaces, to=st.sampled_from(["default", "one", "two", "three"]))
    def rename(self, user: str, name: str, to: str) -> None:
        mine = self.own(user, deleted=None)
        answer = self.attempt(self.store.tenant(user).rename_namespace(name, to))
        if not any(r["namespace"] == name for r in mine):
            assert isinstance(answer, NotFound)
        elif any(r["namespace"] == to for r in mine):
            assert isinstance(answer, Conflict)
        else:
            moved = [r for r in mine if r["namespace"] == name]
            assert answer == len(moved)
            for r in moved:
                self.model[r["id"]] = r | {"namespace": to, "updated_at": NOTHING}

    @rule(user=users, name=namespaces)
    def delete_namespace(self, user: str, name: str) -> None:
        answer = self.attempt(self.store.tenant(user).delete_namespace(name))
        mine = [r for r in self.own(user, deleted=None) if r["namespace"] == name]
        if not mine:
            assert isinstance(answer, NotFound)
            return
        active = [r for r in mine if r["deleted_at"] is None]
        assert answer == len(active)
        for r in active:
            self.model[r["id"]] = r | {"deleted_at": NOTHING, "expires_at": NOTHING, "updated_at": NOTHING}

    @rule(user=users, late=st.booleans())
    def backfill(self, user: str, late: bool) -> None:
        """`late`: what was embedded is no longer the content."""
        queued = [r for r in self.own(user) if r["embedding_status"] == "queued"]
        vectors = [
            Vector(r["id"], user, content_hash("before") if late else r["content_hash"], vector_of(r["content"]))
            for r in queued
        ]
        written = self.run(self.store.backfill().set_vectors(user, vectors))
        assert sorted(written) == ([] if late else sorted(r["id"] for r in queued))
        for memory_id in written:
            self.model[memory_id] |= {"embedding_status": "ready"}

    @precondition(lambda self: len(self.model) > 4)
    @rule()
    def compact(self) -> None:
        self.run(self.store.maintenance().optimize())

    @rule()
    def open_again(self) -> None:
        """What was answered is there for the next process."""
        self.run(self.opened.__aexit__(None, None, None))
        self.opened = open_store(self.directory)
        self.store = self.run(self.opened.__aenter__())

    # -- what they see

    @rule(user=users, content=contents)
    def search_text(self, user: str, content: str) -> None:
        found = self.run(self.store.reader(user).text_arm(WORDS[content], ACTIVE, 50))
        assert {c.id for c in found} == {r["id"] for r in self.own(user) if r["content"] == content}
        keys = [(-c.score, -c.created_us, c.id) for c in found]
        assert keys == sorted(keys)

    @rule(user=users, content=contents, namespace=st.none() | namespaces)
    def search_vector(self, user: str, content: str, namespace: str | None) -> None:
        filters = ACTIVE + ([where.equals("namespace", namespace)] if namespace else [])
        found = self.run(self.store.reader(user).vector_arm(vector_of(content), filters, 50, exact=True))
        ready = [
            r for r in self.own(user)
            if r["embedding_status"] == "ready" and namespace in (None, r["namespace"])
        ]  # fmt: skip
        assert {c.id for c in found} == {r["id"] for r in ready}
        same = {r["id"] for r in ready if r["content"] == content}
        assert {c.id for c in found[: len(same)]} == same

    @rule(
        user=users,
        only=st.booleans(),
        every=st.booleans(),
        tag=st.none() | st.sampled_from(["'", "\\'"]),
        limit=st.integers(1, 4),
    )
    def list(self, user: str, only: bool, every: bool, tag: str | None, limit: int) -> None:
        request = ListRequest(only_deleted=only, include_deleted=every, tag=tag)
        seen: list[str] = []
        after = None
        while page := self.run(self.store.reader(user).page(filters_of_list(request), "recency", after, limit)):
            assert len(page) <= limit
            seen += [r["id"] for r in page]
            after = (page[-1]["created_at"], page[-1]["id"])
        expected = self.own(user, deleted=True if only else None if every else False)
        assert seen == [r["id"] for r in expected if tag is None or tag in r["tags"]]

    @rule(user=users)
    def counts(self, user: str) -> None:
        by_namespace: dict[tuple[str], int] = {}
        for r in self.own(user):
            by_namespace[(r["namespace"],)] = by_namespace.get((r["namespace"],), 0) + 1
        assert self.run(self.store.reader(user).group(["namespace"], ACTIVE)) == by_namespace
        trashed = self.run(self.store.reader(user).count([where.is_not_null("deleted_at")]))
        assert trashed == len(self.own(user, deleted=True))

    @initialize()
    def nothing_yet(self) -> None:
        assert self.run(Inspector(self.store.table).count()) == 0

    @invariant()
    def every_row_is_what_it_should_be(self) -> None:
        kept: dict[str, Row] = {}
        for user in {r["user_id"] for r in self.model.values()}:
            for r in self.run(self.store.all_rows(user)):
                kept[r["id"]] = r
        assert set(kept) == set(self.model)
        assert self.run(Inspector(self.store.table).count()) == len(self.model)
        for memory_id, expected in self.model.items():
            there = kept[memory_id]
            for column in (
                "user_id",
                "namespace",
                "content",
                "tags",
                "title",
                "content_hash",
                "embedding_status",
                "created_at",
            ):
                assert there[column] == expected[column], column
            for column in ("updated_at", "deleted_at", "expires_at"):
                if expected[column] is NOTHING:  # stamped by the store, and from here on known
                    assert there[column] is not None
                    expected[column] = there[column]
                assert there[column] == expected[column], column
        active = [(r["user_id"], r["namespace"], r["content_hash"]) for r in kept.values() if r["deleted_at"] is None]
        assert len(active) == len(set(active))


def test_the_store_is_what_its_model_is() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        StoreMachine,
        settings=settings(
            max_examples=12,
            stateful_step_count=25,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        ),
    )
