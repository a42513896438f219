"""The machine that runbooks are tried on: deployed, healthy, with some memories, and the operator's side of it."""

from __future__ import annotations

import json
import re
import ssl
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from containers.stack import clean_environment, wait_until
from runbooks.play import Reader
from vm import deploys
from vm.machine import Machine, Result, RunMachine

HOST: Final = "127.0.0.1"
DATA: Final = "/var/lib/docker/volumes/warmstart_data/_data"
TABLE: Final = f"{DATA}/lancedb/memories.lance"
SETTLE_S: Final = 240.0
MEMORIES: Final = 30
TENANT: Final = "default"

WriteInventory = Callable[..., Path]


def tool(folder: Path) -> None:
    """What `make` looks for in a tree: the interpreter of these tests, with all that is needed installed."""
    place = folder / ".venv" / "bin"
    place.mkdir(parents=True)
    (place / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (place / "python").chmod(0o755)
    for marker in (".installed", ".installed-ops", ".installed-dev"):
        (folder / ".venv" / marker).touch()


@dataclass
class World:
    machine: Machine
    tree: deploys.Tree
    #: Where `tree` was cloned from.
    origin: deploys.Tree
    write_inventory: WriteInventory
    inventory: Path
    run_machine: RunMachine
    key: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    #: What a fault adds to the inventory, beside what the operator writes there.
    own_fields: dict[str, Any] = field(default_factory=dict)

    # -- its state

    def ops(self, *words: str, ok: bool = True, **options: Any) -> Result:
        done = deploys.run_ops(self.tree, self.inventory, *words, **options)
        assert done.code == 0 or not ok, f"{words} ended with {done.code}\n{done.text[-6000:]}"
        return done

    def set_fields(self, fields: dict[str, Any]) -> None:
        """Of the inventory, beside those that every test has."""
        self.fields = fields
        # the machine's key stays known, however often the inventory is written
        known = {"ssh_known_hosts": str(self.inventory.with_suffix(".known_hosts"))}
        merged = {**known, **self.own_fields, **fields}
        self.inventory.write_text(self.write_inventory(self.machine, **merged).read_text())

    def edit(self, block: str) -> None:
        """Lines as an operator puts them into the inventory's dict."""
        self.set_fields({**self.fields, **eval(f"{{{block}}}")})  # noqa: S307 - the runbook's own

    def deploy(self) -> Result:
        return self.ops("deploy")

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ops("status", "--json", ok=False).out.splitlines()[-1])
        return found

    def until_status(self, what: str, check: Callable[[dict[str, Any]], object], timeout_s: float = 90.0) -> None:
        wait_until(what, lambda: check(self.status()), timeout_s, every_s=1.0)

    def heal(self) -> None:
        """However a runbook left it. Raises AssertionError where it does not become well again."""
        edited = bool(self.fields or self.own_fields)
        self.own_fields = {}
        self.set_fields({})
        self.machine.ssh("systemctl start docker.service", check=False)
        if edited or self.ops("status", f"--wait={SETTLE_S / 4}", ok=False).code:
            self.deploy()
            self.ops("status", f"--wait={SETTLE_S}")

    # -- on the machine

    def ssh(self, command: str, **options: Any) -> str:
        return self.machine.ssh(command, **options).out

    def container(self, service: str) -> str:
        """Its name; of the api, that of the slot with the traffic."""
        if service == "api":
            service = self.status()["ready"].get("slot", "api")
        return f"warmstart-{service}-1"

    def with_override(self, text: str, *services: str) -> None:
        """Containers made anew with other settings than the committed ones, as somebody at the machine might."""
        path = "/run/warmstart/override.yml"
        self.machine.ssh(f"cat > {path}", stdin=text.encode())
        up = "up --detach --no-deps --no-build --pull never"
        self.ssh(f"warmstart-vm compose --file {path} {up} {' '.join(services)}")

    # -- as a client

    def authority(self) -> ssl.SSLContext:
        found = self.ssh("docker exec warmstart-caddy-1 cat /tmp/data/caddy/pki/authorities/local/root.crt")
        return ssl.create_default_context(cadata=found)

    def client(self, key: str = "") -> httpx.Client:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.Client(base_url=self.machine.url, verify=self.authority(), headers=headers, timeout=60)

    def create_key(self, name: str, tenant: str = TENANT) -> str:
        made = self.ops("keys", "create", name, "--tenant", tenant).out
        found = re.search(r"ws_sk_\S+", made)
        assert found, made
        return found[0]

    def save(self, count: int, key: str = "", *, length: int = 0) -> list[str]:
        """Ids of so many new memories, saved as a batch."""
        texts = [f"A note of the runbooks {uuid.uuid4()} {'word ' * (length // 5)}" for _ in range(count)]
        with self.client(key) as client:
            answer = client.post("/v1/memories/batch", json={"memories": [{"content": text} for text in texts]})
        assert answer.status_code == 200, answer.text
        return [one["id"] for one in answer.json()["results"]]

    # -- the one who reads

    def reader(self, values: dict[str, str], say: Callable[[str], None] = print) -> Reader:
        environment = {**clean_environment(), **deploys.IDENTITY, "INVENTORY": str(self.inventory), "LC_ALL": "C.UTF-8"}
        known = {"host": HOST, **values}
        extra = {name: known.pop(name) for name in list(known) if name.isupper()}
        return Reader(self.tree.path, environment | extra, known, self.edit, say=say)


def prepared(world: World) -> World:
    """Deployed, with a key of the runbooks' own and some memories."""
    world.set_fields({})
    world.deploy()
    world.key = world.create_key("runbooks")
    world.save(MEMORIES)
    world.ops("status", f"--wait={SETTLE_S}")
    return world
