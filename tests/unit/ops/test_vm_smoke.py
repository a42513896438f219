"""How the service is tried: which way, with which key, and what is said where it fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ops.vm import smoke
from ops.vm.stack import Container, Release, Stack, VmError

KEY = "ws_sk_very-secret"


@dataclass(frozen=True)
class Recorded(Stack):
    """Answers for Docker, and what the smoke container could read while it ran."""

    refusals: list[str] = field(default_factory=list)
    tenant_there: bool = False
    ran: list[list[str]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def run(self, command: Sequence[str], **options: Any) -> str:
        words = list(command)
        self.ran.append(words)
        if "tenants" in words:
            if self.tenant_there:
                raise VmError("`docker compose run` ended with 4:\nError: there is a tenant")
            return '{"id": "usr_1", "name": "canary"}\n'
        if "keys" in words:
            return json.dumps({"key": f"{KEY}-{len(self.ran)}"}) + "\n"
        if words[:2] == ["docker", "run"]:
            file = Path(words[words.index("--env-file") + 1])
            assert file.stat().st_mode & 0o777 == 0o600
            self.keys.append(file.read_text())
            if self.refusals:
                raise VmError(self.refusals.pop(0))
            return "ok      search      42 ms\n"
        return "certificate" if "exec" in words else ""

    def containers(self, service: str = "") -> list[Container]:
        return (
            [Container("c-api-b", "api-b", "api-b", "running", "", 0, 0, "", "", "", "", {})]
            if service == "api-b"
            else []
        )

    def exec(self, service: str, *argv: str, **options: Any) -> str:
        assert (service, argv) == ("caddy", ("cat", smoke.AUTHORITY))
        return "certificate"


@pytest.fixture
def release(tmp_path: Path) -> Release:
    folder = tmp_path / "opt/warmstart/releases/r1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(
        json.dumps({"images": {"api": {"name": "warmstart/app:1", "id": "sha256:1"}}})
    )
    return Release("r1", folder)


def stack(tmp_path: Path, settings: str = "DOMAIN=memory.example.com\n", **other: Any) -> Recorded:
    (tmp_path / "etc/warmstart").mkdir(parents=True)
    (tmp_path / "etc/warmstart/settings.env").write_text(settings)
    return Recorded(tmp_path, **other)


def smoked(stack: Recorded) -> list[str]:
    return next(words for words in reversed(stack.ran) if words[:2] == ["docker", "run"])


def test_the_key_is_made_once_and_is_in_no_command_line(tmp_path: Path, release: Release) -> None:
    made = stack(tmp_path)
    smoke.run_smoke(made, release, base=None)
    smoke.run_smoke(made, release, base=None)
    assert sum("keys" in words for words in made.ran) == 1
    file = made.etc / smoke.KEY_FILE
    assert file.stat().st_mode & 0o777 == 0o600
    assert set(made.keys) == {f"WARMSTART_API_KEY={file.read_text()}"}
    assert not [words for words in made.ran if KEY in " ".join(words)]
    assert list(made.run_dir.iterdir()) == [], "nothing is left behind"


def test_a_tenant_that_is_there_gets_another_key(tmp_path: Path, release: Release) -> None:
    made = stack(tmp_path, tenant_there=True)
    smoke.run_smoke(made, release, base=None)
    assert len(made.keys) == 1


def test_a_key_that_a_restored_database_does_not_know_is_made_anew(tmp_path: Path, release: Release) -> None:
    made = stack(tmp_path, refusals=["failed  sweep  5 ms  expected 200; got 401 unauthorized"])
    (made.etc / smoke.KEY_FILE).write_text("ws_sk_old\n")
    smoke.run_smoke(made, release, base=None)
    assert made.keys[0] == "WARMSTART_API_KEY=ws_sk_old\n"
    assert KEY in made.keys[1]


def test_it_is_not_made_anew_for_ever(tmp_path: Path, release: Release) -> None:
    made = stack(tmp_path, refusals=["failed  sweep  got 401"] * 3)
    with pytest.raises(VmError, match="401"):
        smoke.run_smoke(made, release, base=None)
    assert len(made.keys) == 2


def test_with_a_domain_the_public_authorities_are_asked(tmp_path: Path, release: Release) -> None:
    made = stack(tmp_path)
    smoke.run_smoke(made, release, base=None)
    words = smoked(made)
    assert words[words.index("--url") + 1] == "https://memory.example.com"
    assert "--ca-file" not in words
    assert {"--network=host", "--add-host=memory.example.com:127.0.0.1"} <= set(words)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("192.0.2.7", "https://192.0.2.7:8443"),
        ("2001:db8::7", "https://[2001:db8::7]:8443"),
        ("box", "https://box:8443"),
    ],
)
def test_by_address_caddys_own_authority_is_the_only_one(
    tmp_path: Path, release: Release, address: str, url: str
) -> None:
    made = stack(tmp_path, f"ADDRESS={address}\nHTTPS_PORT=8443\n")
    smoke.run_smoke(made, release, base=None)
    words = smoked(made)
    assert words[words.index("--url") + 1] == url
    assert words[words.index("--ca-file") + 1] == "/root.crt"
    assert [word for word in words if word.startswith("--volume=") and word.endswith(":/root.crt:ro")]
    assert bool([word for word in words if word.startswith("--add-host")]) is (address == "box")


def test_one_api_is_tried_from_within_its_network(tmp_path: Path, release: Release) -> None:
    made = stack(tmp_path)
    smoke.run_smoke(made, release, base="http://api-b:8484")
    words = smoked(made)
    assert "--network=container:c-api-b" in words
    assert words[words.index("--url") + 1] == "http://127.0.0.1:8484"


@pytest.mark.parametrize("base", ["http://api:8484", "http://elsewhere.example.com:80"])
def test_one_that_does_not_run_or_is_none(tmp_path: Path, release: Release, base: str) -> None:
    with pytest.raises(VmError, match="no such api runs"):
        smoke.run_smoke(stack(tmp_path), release, base=base)


@pytest.mark.parametrize(("setting", "mode"), [("", "hybrid"), ("EMBEDDING_ENABLED=False\n", "keyword")])
def test_the_mode_that_is_asked_for(tmp_path: Path, release: Release, setting: str, mode: str) -> None:
    made = stack(tmp_path, f"DOMAIN=memory.example.com\n{setting}")
    smoke.run_smoke(made, release, base=None)
    words = smoked(made)
    assert words[words.index("--mode") + 1] == mode


def test_what_failed_is_said_and_not_what_passed(tmp_path: Path, release: Release) -> None:
    said = (
        "`docker run` ended with 1:\nok      save   5 ms  fine\nfailed  search     812 ms  expected hybrid; got keyword"
    )
    with pytest.raises(VmError) as failed:
        smoke.run_smoke(stack(tmp_path, refusals=[said]), release, base=None)
    assert str(failed.value) == "failed search 812 ms expected hybrid; got keyword"
