"""Folders, settings and the model, against what a machine answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops import model, settings
from ops.inventory import Target
from ops.runner import Deploy, Refused
from ops.source import ROOT
from ops.steps import layout
from tests.unit.ops import tree
from tests.unit.ops.steptest import Answers, Ran, run_step

#: Facts of files and folders that are not there are empty.
BARE: Answers = {"test -d": "no", re.compile(r"stat |test -e|TMPDIR"): ""}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    source = tree.make(tmp_path / "tree")

    def run_(answers: Answers, **fields: Any) -> Ran:
        def apply(deploy: Deploy) -> None:
            deploy.source = source
            layout.apply(deploy)

        return run_step(apply, answers, **fields)

    return run_


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    (made / "1_Pooling").mkdir(parents=True)
    (made / ".cache").mkdir()
    (made / "config.json").write_text("{}")
    (made / "1_Pooling" / "config.json").write_text("{}")
    (made / ".cache" / "lock").write_text("")
    return made


def test_a_bare_machine_gets_all_of_it(run: Callable[..., Ran]) -> None:
    ran = run(BARE)
    assert "Settings of the stack" in ran.operations
    assert "The program of the VM" in ran.operations
    assert ran.files["/usr/local/bin/warmstart-vm"] == layout.WRAPPER
    [fetch] = [name for name in ran.operations if name.startswith("Fetch the embedding model")]
    assert model.FOLDER in fetch


def test_a_model_that_is_there_is_not_fetched_again(run: Callable[..., Ran]) -> None:
    ran = run({**BARE, "test -d": "yes"})
    assert not [name for name in ran.operations if "model" in name and "Folder" not in name]


def test_a_folder_is_carried_and_it_is_said_where_it_is_another_model(run: Callable[..., Ran], folder: Path) -> None:
    ran = run(BARE, model=str(folder))
    assert [name for name in ran.operations if name.startswith("Carry the embedding model")]
    assert "is not intfloat/multilingual-e5-small" in ran.notes[0]


def test_what_goes_into_the_settings(run: Callable[..., Ran]) -> None:
    text = run(BARE, settings={"RATE_LIMIT_PER_MINUTE": "1200"}).files[settings.FILE]
    lines = text.splitlines()
    assert {"DOMAIN=memory.example.com", "COMPOSE_PROFILES=postgres", "RATE_LIMIT_PER_MINUTE=1200"} <= set(lines)
    assert 'EMBED_DOC_PREFIX="passage: "' in lines
    assert not [
        line for line in lines if line.startswith(("ADDRESS", "REDIS_PASSWORD", "DATABASE_URL", "OPENAI_API_KEY"))
    ]
    [folder] = [line for line in lines if line.startswith("MODEL_DIR=")]
    assert folder == f"MODEL_DIR={model.pinned(ROOT).folder}"


class TestSettings:
    def text(self, **fields: Any) -> str:
        return settings.text(Target(**{"host": "h", "domain": "memory.example.com", **fields}), ROOT, "/model")

    def test_both_quotes_are_refused(self) -> None:
        with pytest.raises(Refused, match="EMBED_REVISION has both kinds of quotes"):
            self.text(settings={"EMBED_REVISION": 'it\'s "x"'})

    def test_another_model_has_not_the_prefixes_of_e5(self) -> None:
        text = self.text(settings={"EMBED_MODEL": "nomic-embed-text", "EMBEDDING_DIM": "768"})
        assert "PREFIX" not in text

    def test_an_e5_prefix_without_its_blank_is_refused(self) -> None:
        with pytest.raises(Refused, match="needs its trailing blank"):
            self.text(settings={"EMBED_DOC_PREFIX": "passage:"})

    def test_somebody_elses_service_needs_a_secret_of_theirs(self) -> None:
        fields = {"settings": {"OPENAI_BASE_URL": "https://api.example.com/v1"}}
        with pytest.raises(Refused, match="OPENAI_API_KEY"):
            self.text(**fields)
        given = {**fields, "secrets": {"OPENAI_API_KEY": "env:KEY"}}
        assert "OPENAI_BASE_URL=https://api.example.com/v1" in self.text(**given)
        assert settings.must_be_given(Target(host="h", domain="memory.example.com", **given)) == ["OPENAI_API_KEY"]

    def test_a_database_elsewhere(self) -> None:
        target = Target(host="h", domain="memory.example.com", postgres=False, secrets={"DATABASE_URL": "env:DSN"})
        assert "COMPOSE_PROFILES" not in settings.text(target, ROOT, "/model")
        assert settings.must_be_given(target) == ["DATABASE_URL"]


class TestModel:
    def test_it_is_the_one_that_the_app_is_made_for(self) -> None:
        from warmstart import config

        assert config.PINNED_REVISION == model.REVISION
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(model.pinned(ROOT).checksums)
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in model.pinned(ROOT).checksums.values())
        assert model.REVISION in (ROOT / "compose" / ".env.example").read_text()

    def test_a_folder_is_known_by_its_files(self, folder: Path) -> None:
        before = model.of_folder(folder)
        assert set(before.checksums) == {"config.json", "1_Pooling/config.json"}
        (folder / "config.json").write_text('{"a": 1}')
        assert model.of_folder(folder).folder != before.folder

    def test_a_folder_that_is_no_models(self, tmp_path: Path) -> None:
        for i in range(model.MAX_FILES + 1):
            (tmp_path / str(i)).write_text("")
        with pytest.raises(model.ModelError, match="give its own folder"):
            model.of_folder(tmp_path)
