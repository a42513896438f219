"""Backup, drill and restore by the program of the VM, with real restic, on a stack of its own."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import build
import httpx
import init_env
import pytest
from stack import COMPOSE, ROOT, SERVICES, Stack, clean_environment, command, wait_until

from ops.vm.apps import Apps
from ops.vm.database import Live, rows_of_dump
from ops.vm.stack import Stack as VmStack

pytestmark = pytest.mark.slow

PROJECT: Final = "warmstart-bak"
APP: Final = ("api", "api-b", "worker", "redis-rest")
OTHER: Final = {"embeddings": "tei"}
TIMEOUT_S: Final = 300
PROGRAM: Final = ROOT / "ops/vm"
WRITERS: Final = 3
#: What writers may wait for the copy, on a machine that does much else.
LONGEST_HOLD_MS: Final = 1_000


@dataclass
class Vm:
    """A root folder laid out as a deploy does it."""

    root: Path
    stack: Stack
    #: id → content of each memory whose save was answered
    saved: dict[str, str] = field(default_factory=dict)

    @property
    def etc(self) -> Path:
        return self.root / "etc/warmstart"

    @property
    def local(self) -> Path:
        return self.root / "var/backups/warmstart"

    @property
    def offsite(self) -> Path:
        """A folder that stands for another place."""
        return self.root / "elsewhere"

    def lay_out(self) -> None:
        release = self.root / "opt/warmstart/releases/first"
        (release / "compose").mkdir(parents=True)
        shutil.copy(COMPOSE / "compose.yml", release / "compose")
        shutil.copytree(COMPOSE / "caddy", release / "compose/caddy")
        names = {s: build.tag("app" if s in APP else OTHER.get(s, s)) for s in (*SERVICES, "api-b")}
        ids = {n: command("docker", "image", "inspect", "--format", "{{.Id}}", n).strip() for n in set(names.values())}
        lines = ["services:"]
        for service, image in names.items():
            lines += [f"  {service}:", f"    image: {image}", "    pull_policy: never", "    build: !reset null"]
        (release / "compose.images.yml").write_text("\n".join(lines) + "\n")
        images = {service: {"name": name, "id": ids[name]} for service, name in names.items()}
        (release / "manifest.json").write_text(json.dumps({"release": "first", "commit": "c0ffee", "images": images}))
        self.write_settings()

    def start_all(self) -> None:
        """What a deploy has rolled out, without its tests of it."""
        self.run("services", "first")
        release = self.root / "opt/warmstart/releases/first"
        files = [word for n in ("compose/compose.yml", "compose.images.yml") for word in ("--file", str(release / n))]
        where = ["--project-name", PROJECT, "--project-directory", str(self.root / "opt/warmstart/config")]
        env = [word for name in ("settings", "secrets") for word in ("--env-file", str(self.etc / f"{name}.env"))]
        up = ["up", "--detach", "--wait", "--no-deps", "redis-rest", "api", "worker"]
        command("docker", "compose", "--ansi", "never", *where, *env, *files, *up)
        (self.root / "opt/warmstart/current").symlink_to("releases/first")

    def write_settings(self) -> None:
        """Each time with new secrets, as on a new machine."""
        self.etc.mkdir(parents=True, exist_ok=True)
        secret = re.compile(rf"({'|'.join((*init_env.SECRETS, 'DATABASE_URL'))})=")
        lines = [line for line in self.stack.env_file.read_text().splitlines() if re.match("[A-Z]", line)]
        for name, kept in (("settings", False), ("secrets", True)):
            text = "".join(f"{line}\n" for line in lines if bool(secret.match(line)) is kept)
            if kept:
                text = init_env.fill(re.sub(r"(?m)^(\w+)=[0-9a-f]{48}$", r"\1=", text))
            (self.etc / f"{name}.env").write_text(text)
        password = init_env.secrets.token_hex(16)
        (self.etc / "backup.env").write_text(
            f"RESTIC_REPOSITORY={self.local}\nOFFSITE_REPOSITORY={self.offsite}\nRESTIC_PASSWORD={password}\n"
            "KEEP_DAILY=7\nKEEP_WEEKLY=4\nKEEP_MONTHLY=6\n"
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        env = {"WARMSTART_VM_ROOT": str(self.root), "WARMSTART_VM_PROJECT": PROJECT}
        return subprocess.Popen(
            [sys.executable, PROGRAM, *words], env={**clean_environment(), **env},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *words: str, code: int = 0, stdin: str = "") -> str:
        with self.start(*words) as program:
            said, _ = program.communicate(stdin, timeout=TIMEOUT_S)
        print(f"$ {' '.join(words)}\n{said}")
        assert program.returncode == code, said
        return said

    def result(self, kind: str) -> dict[str, Any]:
        return json.loads((self.root / f"var/lib/warmstart/{kind}.json").read_text())  # type: ignore[no-any-return]

    def restic(self, repository: Path, *words: str) -> Any:
        password = self.secret("backup", "RESTIC_PASSWORD")
        environment = {**clean_environment(), "RESTIC_PASSWORD": password, "RESTIC_REPOSITORY": str(repository)}
        done = subprocess.run(
            ["restic", "--no-cache", *words], env=environment, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout) if "--json" in words else done.stdout

    def secret(self, file: str, name: str) -> str:
        found = re.search(rf"(?m)^{name}=(.*)$", (self.etc / f"{file}.env").read_text())
        assert found
        return found[1]

    @property
    def volume(self) -> Path:
        return Path(command("docker", "volume", "inspect", "--format", "{{.Mountpoint}}", f"{PROJECT}_data").strip())

    def leftovers(self) -> list[str]:
        """Containers, networks and folders of a moment."""
        containers = command("docker", "ps", "--all", "--format", "{{.Names}}", "--filter", f"name=^{PROJECT}-").split()
        own = {f"{PROJECT}-{name}-1" for name in (*SERVICES, "api-b")}
        networks = command("docker", "network", "ls", "--format", "{{.Name}}", "--filter", f"name=^{PROJECT}-").split()
        beside = [p.name for p in self.volume.parent.iterdir() if p.name != "_data"]
        scratch = [p.name for p in self.root.glob("var/lib/warmstart/scratch/*")]
        return [*(name for name in containers if name not in own), *networks, *beside, *scratch]

    # -- as a client

    def save(self, client: httpx.Client, content: str) -> None:
        answer = client.post("/v1/memories", json={"content": content, "namespace": "backup"})
        assert answer.status_code == 201, answer.text
        self.saved[answer.json()["id"]] = content

    def there(self, key: str) -> dict[str, str]:
        """id → content of all memories."""
        found: dict[str, str] = {}
        params: dict[str, Any] = {"namespace": "backup", "limit": 200}
        with self.stack.client(key) as client:
            while True:
                page = client.get("/v1/memories", params=params).raise_for_status().json()
                found |= {row["id"]: row["content"] for row in page["memories"]}
                if not page["next_cursor"]:
                    return found
                params["cursor"] = page["next_cursor"]

    @contextmanager
    def load(self, key: str) -> Iterator[None]:
        """Clients that save without a pause; each of their requests succeeds."""
        over = threading.Event()

        def work(number: int) -> None:
            with self.stack.client(key) as client:
                count = 0
                while not over.is_set():
                    self.save(client, f"writer {number} at {time.time()} says {count}")
                    count += 1

        with ThreadPoolExecutor(WRITERS) as pool:
            writers = [pool.submit(work, number) for number in range(WRITERS)]
            try:
                yield
            finally:
                over.set()
            for writer in writers:
                writer.result()


@pytest.fixture(scope="module")
def vm(make_stack: Callable[..., Stack], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vm]:
    stack = make_stack(
        PROJECT, "172.30.89", RATE_LIMIT_PER_MINUTE="60000", VERSION_RETENTION_S="60", OPTIMIZE_AFTER_S="1"
    )
    root = tmp_path_factory.mktemp("vm")
    for folder in (root, *root.parents[:2]):
        folder.chmod(0o755)  # caddy's rules are for another user
    made = Vm(root, stack)
    made.lay_out()
    stack.compose("--profile", "*", "down", "--volumes", "--remove-orphans")  # of a run that was killed
    try:
        made.start_all()
        stack.fetch_authority()
        yield made
    finally:
        stack.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")


@pytest.fixture(scope="module")
def key(vm: Vm) -> str:
    made = vm.stack.create_key()
    with vm.stack.client(made) as client:
        wait_until("it is known", lambda: client.get("/v1/memories").status_code == 200)
    return made


# -- tests, in this order: each goes on where the one before it ended


def test_a_backup_under_load_has_all_that_was_answered_before_it(vm: Vm, key: str) -> None:
    with vm.load(key):
        time.sleep(2)
        before = dict(vm.saved)
        said = vm.run("backup")
        after = dict(vm.saved)
    result = vm.result("backup")
    assert result["ok"]
    assert result["offsite"]["ok"]
    assert len(before) <= result["rows"] <= len(after)
    assert result["held_ms"] < LONGEST_HOLD_MS
    assert not vm.leftovers()
    for name in ("REDIS_PASSWORD", "POSTGRES_PASSWORD", "OPENAI_API_KEY"):
        assert vm.secret("secrets", name) not in said
    for repository in (vm.local, vm.offsite):
        [snapshot] = vm.restic(repository, "snapshots", "--json")
        assert f"rows={result['rows']}" in snapshot["tags"]


def test_a_drill_opens_it_and_says_how_old_it_is(vm: Vm) -> None:
    backup = vm.result("backup")
    vm.run("drill")
    drill = vm.result("drill")
    assert drill["ok"]
    assert drill["repository"] == str(vm.offsite)
    assert [drill[name] for name in ("rows", "tenants", "database_rows", "taken_at")] == [
        backup[name] for name in ("rows", "tenants", "database_rows", "taken_at")
    ]
    assert drill["found"] == drill["searched"] > 0
    assert 0 <= drill["age_seconds"] < 120
    assert not vm.leftovers()


@pytest.mark.parametrize(("after", "seconds"), [("memories", 0.0), ("bookkeeping", 0.3), ("inventory", 0.1)])
def test_a_backup_that_is_killed_is_no_hindrance_to_the_next(after: str, seconds: float, vm: Vm) -> None:
    """By kill -9: with the copy, a look at it, or restic under way; the third leaves what all three did."""
    with vm.start("backup") as program:
        assert program.stdout is not None
        while f"s  {after}" not in (line := program.stdout.readline()):
            assert line, "it ended before that"
        time.sleep(seconds)
        program.kill()
    if after == "inventory":
        vm.run("backup")
        assert not vm.leftovers()
        for snapshot in vm.restic(vm.local, "snapshots", "--json"):
            names = vm.restic(vm.local, "ls", snapshot["id"]).split()
            assert {"/about.json", "/data", "/database.dump", "/etc", "/inventory.json", "/rows.json"} <= set(names)


def test_a_drill_of_a_damaged_repository_fails_and_says_so(vm: Vm, tmp_path: Path) -> None:
    good = vm.result("drill")
    damaged = tmp_path / "damaged"
    shutil.copytree(vm.offsite, damaged)
    for pack in (damaged / "data").glob("*/*"):
        content = bytearray(pack.read_bytes())
        content[len(content) // 3] ^= 0xFF
        pack.chmod(0o600)
        pack.write_bytes(content)
    vm.run("drill", "--repository", str(damaged), code=1)
    failed = vm.result("drill")
    assert (failed["ok"], failed["part"]) == (False, "snapshot")
    assert failed["last_success"]["at"] == good["at"]
    assert not vm.leftovers()


def test_a_damaged_repository_is_set_aside_and_begun_afresh(vm: Vm) -> None:
    before = [s["id"] for s in vm.restic(vm.local, "snapshots", "--json")]
    said = vm.run("backup", "--afresh")
    [aside] = vm.local.parent.glob(f"{vm.local.name}.*")
    assert str(aside) in said
    assert [s["id"] for s in vm.restic(aside, "snapshots", "--json")] == before
    assert len(vm.restic(vm.local, "snapshots", "--json")) == 1
    vm.run("drill", "--repository", "local")
    shutil.rmtree(aside)


def test_a_backup_can_be_the_only_one(vm: Vm) -> None:
    """As when a tenant was deleted: no earlier snapshot is left, here or elsewhere, nor data that only they had."""
    vm.run("backup")
    said = vm.run("backup", "--forget-earlier")
    for repository in (vm.local, vm.offsite):
        [left] = vm.restic(repository, "snapshots", "--json")
        assert f"{repository}: " in said
        assert left["short_id"] in said
        whole = vm.restic(repository, "stats", "--json", "--mode", "raw-data")
        assert len(list((repository / "data").rglob("?" * 64))) > 0
        stored = sum(p.stat().st_size for p in (repository / "data").rglob("*") if p.is_file())
        # what one snapshot needs, and what trees and headers of packs take
        assert stored < whole["total_size"] + 65_536
    vm.run("drill")


def test_a_drill_that_can_not_run_is_a_failed_one(vm: Vm, tmp_path: Path) -> None:
    vm.run("drill", "--repository", str(tmp_path / "nowhere"), code=1)
    assert "there is no repository" in vm.result("drill")["reason"]


def test_a_backup_without_its_offsite_copy_is_a_failed_one(vm: Vm) -> None:
    good = vm.result("backup")
    settings = (vm.etc / "backup.env").read_text()
    (vm.etc / "backup.env").write_text(settings.replace(str(vm.offsite), "/dev/null/nowhere"))
    vm.run("backup", code=1)
    (vm.etc / "backup.env").write_text(settings)
    failed = vm.result("backup")
    assert (failed["ok"], failed["part"], failed["offsite"]["ok"]) == (False, "offsite copy", False)
    assert failed["last_success"]["snapshot"] == good["snapshot"]
    assert failed["snapshot"] in {s["id"] for s in vm.restic(vm.local, "snapshots", "--json")}


def test_live_memories_are_not_replaced_unless_asked_for(vm: Vm, key: str) -> None:
    before = vm.there(key)
    assert "--replace" in vm.run("restore", code=2)
    assert "nothing was done" in vm.run("restore", "--replace", "another-host", code=2)
    assert vm.there(key) == before


def test_a_lost_machine_comes_back_on_a_new_one(vm: Vm, key: str) -> None:
    """It has other secrets and an empty repository of its own; of the old one there is no more than what is offsite."""
    before = vm.there(key)
    assert before == vm.saved
    old = {name: vm.secret("secrets", name) for name in ("POSTGRES_PASSWORD", "REDIS_PASSWORD")}
    given = {"RESTIC_PASSWORD": vm.secret("backup", "RESTIC_PASSWORD")}
    vm.stack.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5")
    shutil.rmtree(vm.local)
    vm.write_settings()
    command("restic", "--no-cache", "init", "--repo", str(vm.local), **_password(vm))
    assert vm.secret("secrets", "POSTGRES_PASSWORD") != old["POSTGRES_PASSWORD"]

    said = vm.run("restore", "--repository", str(vm.offsite), stdin=json.dumps(given))
    assert "Lost: what was saved after" in said
    assert not any(secret in said for secret in (*old.values(), *given.values()))
    assert {name: vm.secret("secrets", name) for name in old} == old
    assert not vm.leftovers()
    assert (vm.volume.stat().st_uid, vm.volume.stat().st_mode & 0o777) == (10001, 0o700)
    vm.stack.fetch_authority()
    assert vm.there(key) == before
    with vm.stack.client(key) as client:
        vm.save(client, "saved after the restore")
    # both repositories open with the old password
    vm.run("backup")


def test_a_mishap_is_undone(vm: Vm, key: str) -> None:
    """On the same machine, whose passwords were changed since; what came after the backup is gone, and that is said."""
    before = vm.there(key)
    secrets = (vm.etc / "secrets.env").read_text()
    lines = sorted(secrets.splitlines())
    with vm.stack.client(key) as client:
        vm.save(client, "saved after the backup")
        for memory_id in list(before)[:3]:
            client.delete(f"/v1/memories/{memory_id}", params={"hard": True}).raise_for_status()
    (vm.etc / "secrets.env").write_text(re.sub(r"(?m)^(POSTGRES_PASSWORD)=.*$", r"\1=another", secrets))
    vm.run("restore", "--replace", socket.gethostname())
    assert sorted((vm.etc / "secrets.env").read_text().splitlines()) == lines
    assert vm.there(key) == before
    assert not vm.leftovers()


@pytest.fixture
def elsewhere(vm: Vm) -> Iterator[Callable[[], str]]:
    """Makes servers that are no part of the stack; the URL of each, by its address in the outer network."""
    names: list[str] = []

    def make() -> str:
        names.append(f"{PROJECT}-elsewhere-{len(names)}")
        env = ("POSTGRES_USER=else where", "POSTGRES_DB=main", "POSTGRES_PASSWORD=p:@/ss")
        words = [word for one in env for word in ("--env", one)]
        network = f"{PROJECT}_edge"
        where = ["--name", names[-1], "--network", network, "--user", "999:999"]
        command("docker", "run", "--detach", *where, *words, build.tag("postgres"))
        [found] = json.loads(command("docker", "inspect", names[-1]))
        address = found["NetworkSettings"]["Networks"][network]["IPAddress"]
        wait_until("it answers", lambda: socket.create_connection((address, 5432), 1).close() or True)
        return f"postgresql://else%20where:p%3A%40%2Fss@{address}/main?connect_timeout=10"

    yield make
    command("docker", "rm", "--force", "--volumes", *names)


def test_a_database_elsewhere_is_dumped_and_filled(vm: Vm, elsewhere: Callable[[], str], tmp_path: Path) -> None:
    vm_stack = VmStack(vm.root, PROJECT)
    source, target = (Live(Elsewhere(vm_stack, vm_stack.release("first"), elsewhere())) for _ in range(2))
    source._elsewhere(("psql", "--quiet"), text="CREATE TABLE t (a int); INSERT INTO t VALUES (1), (2);")
    dump = tmp_path / "database.dump"
    source.dump(dump)
    assert rows_of_dump(source.apps, dump) == {"public.t": 2}
    assert target.restore(dump, resumed=False) == {"public.t": 2}
    # it has data by now
    assert target.restore(dump, resumed=False) is None


@dataclass(frozen=True)
class Elsewhere(Apps):
    """Of a stack whose database is not its own."""

    url: str = ""

    @property
    def own_postgres(self) -> bool:
        return False

    @property
    def database_url(self) -> str:
        return self.url


def _password(vm: Vm) -> Mapping[str, Any]:
    return {"stdin": f"{vm.secret('backup', 'RESTIC_PASSWORD')}\n" * 2}
