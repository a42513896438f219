"""What a deploy writes into env files is what Compose reads out of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stack import command

from ops import settings
from ops.inventory import Target
from ops.source import ROOT
from ops.vm import secrets

VALUES = [
    "a b", "passage: ", "a#b", "a #b", "a $HOME b", "${HOME}", 'say "x"', "a\\nb", "", "https://a/b?c=d&e",
    "ünïcode",
    "postgresql://u:p%40ss@db.example.com/x?sslmode=require",
]  # fmt: skip


def read_back(name: str, text: str, folder: Path) -> str:
    (folder / "read.env").write_text(text)
    (folder / "compose.yml").write_text(
        f"services:\n  a:\n    image: a\n    environment:\n      VALUE: ${{{name}}}\n      {name}:\n"
    )
    words = ("docker", "compose", "--env-file", str(folder / "read.env"), "-f", str(folder / "compose.yml"))
    found = json.loads(command(*words, "config", "--format", "json"))["services"]["a"]["environment"]
    # a dollar is doubled there, so that the output is a Compose file again
    assert found["VALUE"] == found[name]
    return str(found[name]).replace("$$", "$")


@pytest.mark.parametrize("value", [*VALUES, "it's"])
def test_settings(value: str, tmp_path: Path) -> None:
    target = Target(host="h", domain="memory.example.com", settings={"EMBED_REVISION": value})
    assert read_back("EMBED_REVISION", settings.text(target, ROOT, "/model"), tmp_path) == value


@pytest.mark.parametrize("value", VALUES)
def test_secrets(value: str, tmp_path: Path) -> None:
    assert read_back("DATABASE_URL", secrets.render({"DATABASE_URL": value}), tmp_path) == value
