"""The data set: the same for a seed, of realistic sizes, and every memory one that the service takes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from loadtests.data import LANGUAGES, NAMESPACES, SIZES, TOPICS, Generator, Item
from warmstart.memory import NewMemory, SearchRequest, parse

ROOT = Path(__file__).parents[3]
NOTES = ROOT / "loadtests" / "quality" / "notes.jsonl"


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return list(Generator(1, "load-seed", tenants=10).items(5_000))


def test_the_same_seed_gives_the_same_memories_and_queries() -> None:
    one, same, other = (Generator(seed, "p", 3) for seed in (7, 7, 8))
    first = [*one.items(50), one.query()]
    assert first == [*same.items(50), same.query()]
    assert first != [*other.items(50), other.query()]


def test_a_seed_means_the_same_in_every_process() -> None:
    program = "from loadtests.data import *; print([i.memory for i in Generator('1-load', 'p').items(20)])"

    def said(hash_seed: str) -> str:
        environ = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
        ).stdout

    assert said("1") == said("2") != ""


def test_every_memory_and_query_is_valid_and_no_content_comes_twice(items: list[Item]) -> None:
    for item in items[:500]:
        parse(NewMemory, item.memory)
    generator = Generator(3, "p")
    for _ in range(200):
        parse(SearchRequest, {"query": generator.query()})
    assert len({item.memory["content"] for item in items}) == len(items)


def test_sizes_are_those_of_real_notes(items: list[Item]) -> None:
    real = sorted(len(json.loads(line)["content"]) for line in NOTES.read_text().splitlines())
    made = sorted(len(item.memory["content"]) for item in items)
    assert statistics.median(made) == pytest.approx(statistics.median(real), rel=0.25)
    assert made[int(0.95 * len(made))] == pytest.approx(real[int(0.95 * len(real))], rel=0.25)


def test_tenants_and_namespaces_are_zipf_like(items: list[Item]) -> None:
    tenants = Counter(item.tenant for item in items)
    assert [tenant for tenant, _ in tenants.most_common(3)] == [0, 1, 2]
    assert tenants[0] / tenants[9] == pytest.approx(10, rel=0.4)
    namespaces = Counter(item.memory["namespace"] for item in items)
    assert len(namespaces) == NAMESPACES
    assert all(name.startswith("load-seed-") for name in namespaces)
    assert namespaces.most_common()[0][1] > 4 * namespaces.most_common()[-1][1]


def test_languages_and_topics(items: list[Item]) -> None:
    texts = [item.memory["content"] for item in items]
    foreign = sum(any(ord(c) > 0x3000 for c in text) for text in texts) / len(texts)
    prose = 1 - Counter(item.memory["type"] for item in items)["code"] / len(items)
    assert foreign == pytest.approx((LANGUAGES["zh"] + LANGUAGES["ja"]) / 100 * prose, abs=0.02)
    assert all(0 <= item.topic < len(TOPICS) for item in items)
    assert len({item.topic for item in items}) > len(TOPICS) * 0.8


def test_the_sizes_on_offer() -> None:
    assert SIZES == {"1k": 1_000, "10k": 10_000, "100k": 100_000}
