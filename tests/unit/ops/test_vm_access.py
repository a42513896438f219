"""Words that are handed on to another program, whatever they begin with."""

from __future__ import annotations

import argparse

import pytest

from ops.vm import access


@pytest.mark.parametrize(
    "words",
    [
        ["compose", "--profile", "b", "logs", "--tail=20", "-f", "api"],
        ["compose", "--help"],
        ["keys", "create", "x", "--json"],
        ["keys"],
        ["warmstart", "tenants", "list", "--json"],
    ],
)
def test_all_words_are_handed_on(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    access.add_parser(parser.add_subparsers(dest="command"))
    assert parser.parse_args(words).words == words[1:]
