"""What each runbook is about, done to the machine. A fault is there, and seen, when its block begins.

What the block yields are the values that the runbook's reader knows. What is not mended by the runbook itself is put
right at the end of the block.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from containers import build
from containers.stack import command, model_folder
from runbooks.world import DATA, HOST, TABLE, World
from vm.deploys import IMAGES, git
from warmstart.memory import MAX_BATCH
from warmstart.store.maintenance import MAX_UNINDEXED_ROWS

Fault = Callable[[World], Iterator[Mapping[str, str] | None]]
FAULTS: Final[dict[str, Callable[[World], AbstractContextManager[Mapping[str, str] | None]]]] = {}


def fault(name: str) -> Callable[[Fault], Fault]:
    def register(function: Fault) -> Fault:
        FAULTS[name] = contextmanager(function)
        return function

    return register


def degraded(name: str) -> Callable[[dict[str, Any]], bool]:
    return lambda status: name in (status["ready"].get("degraded") or {})


# -- containers


def ended(service: str) -> Fault:
    def bring(world: World) -> Iterator[None]:
        world.ssh(f"docker stop {world.container(service)}")
        yield

    return bring


for _name, _service in (("api-down", "api"), ("worker-down", "worker"), ("https-down", "caddy")):
    fault(_name)(ended(_service))


@fault("search-degraded")
def _(world: World) -> Iterator[None]:
    world.ssh("docker stop warmstart-embeddings-1")
    _search(world)
    world.until_status("degraded", degraded("embedding"))
    yield


def _search(world: World) -> None:
    """Dependencies are found missing when somebody asks for them."""
    with world.client() as client:
        for number in range(6):
            client.post("/v1/search", json={"query": f"who asks, the {number}th time, at {time.time()}"})


@fault("container-down")
def _(world: World) -> Iterator[None]:
    world.ssh("docker rm --force --volumes warmstart-embeddings-1")
    _search(world)
    world.until_status("degraded", degraded("embedding"))
    yield


@fault("container-restarts")
def _(world: World) -> Iterator[None]:
    world.with_override("services: {worker: {environment: {EMBEDDING_DIM: wide}}}", "worker")
    world.until_status(
        "it restarts", lambda s: any(c["state"] == "restarting" and c["restarts"] > 1 for c in s["containers"])
    )
    yield


@fault("container-memory")
def _(world: World) -> Iterator[None]:
    [worker] = [c for c in world.status()["containers"] if c["service"] == "worker"]
    rest = int(0.95 * worker["memory_limit_bytes"] - worker["memory_bytes"])
    script = f"import time; kept = b'x' * {rest}; time.sleep(3600)"
    world.ssh(f'docker exec --detach warmstart-worker-1 python3 -c "{script}"')
    world.until_status("it is full", lambda s: any(_share(c) > 0.9 for c in s["containers"] if c["memory_bytes"]))
    yield


def _share(container: Mapping[str, Any]) -> float:
    return float(container["memory_bytes"] / container["memory_limit_bytes"])


@fault("dependency-down")
def _(world: World) -> Iterator[None]:
    world.ssh("docker pause warmstart-redis-rest-1")
    _search(world)
    world.until_status("degraded", degraded("redis"))
    yield


@fault("redis-lost")
def _(world: World) -> Iterator[None]:
    world.ssh("docker rm --force --volumes warmstart-redis-1")
    _search(world)
    world.until_status("degraded", degraded("redis"))
    yield


@fault("postgres-unreachable")
def _(world: World) -> Iterator[None]:
    world.machine.ssh(
        "docker exec --interactive warmstart-postgres-1 psql --quiet --username=warmstart",
        stdin=b"ALTER USER warmstart PASSWORD 'another'; SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        b" WHERE pid <> pg_backend_pid() AND usename = 'warmstart';\n",
    )
    world.until_status("degraded", degraded("postgres"))
    yield


# -- vectors


@fault("embedding-queue-stuck")
def _(world: World) -> Iterator[None]:
    world.with_override("services: {embeddings: {environment: {API_KEY: another-key}}}", "embeddings")
    world.save(5)
    _search(world)
    world.until_status("they wait", lambda s: s["queue"].get("waiting") and degraded("embedding")(s))
    yield


@fault("embedding-given-up")
def _(world: World) -> Iterator[None]:
    world.with_override(
        "services: {embeddings: {environment: {AUTO_TRUNCATE: 'false'}},"
        " worker: {environment: {EMBED_MAX_ATTEMPTS: '1'}}}",
        "embeddings", "worker",
    )  # fmt: skip
    world.save(1, length=7000)
    world.until_status("it is given up", lambda s: s["queue"].get("failed"))
    yield


# -- the store


@contextmanager
def roots(world: World, *folders: str) -> Iterator[None]:
    """Folders of the table as a command leaves them that was run as root."""
    named = " ".join(f"{TABLE}/{folder}" for folder in folders)
    world.ssh(f"chown root:root {named} && chmod 755 {named}")
    try:
        yield
    finally:
        world.ssh(f"chown --recursive 10001:10001 {DATA}")


@fault("lancedb-compaction-lag")
def _(world: World) -> Iterator[None]:
    with roots(world, "_indices"), world.client() as client:
        # as many as make a compaction due at once
        for _batch in range(MAX_UNINDEXED_ROWS // MAX_BATCH):
            memories = [{"content": f"One of many writes {uuid.uuid4()}"} for _ in range(MAX_BATCH)]
            client.post("/v1/memories/batch", json={"memories": memories}).raise_for_status()
        yield


@fault("error-rate")
def _(world: World) -> Iterator[None]:
    with roots(world, "data", "_versions"):
        yield


@fault("lancedb-corrupt-version")
def _(world: World) -> Iterator[None]:
    # the last write is one whose loss nobody minds: what a power cut takes is what was not answered for
    world.save(1)
    time.sleep(2)
    world.ssh(f"cd {TABLE}/_versions && file=$(ls | head -1) && truncate --size=-7 $file")
    world.until_status("degraded", degraded("lancedb"))
    yield


@fault("restore-from-backup")
def _(world: World) -> Iterator[None]:
    world.ops("backup")
    world.ssh(f"warmstart-vm compose --profile b stop && rm -rf {DATA}/*")
    yield


@fault("delete-a-tenant")
def _(world: World) -> Iterator[None]:
    world.ops("warmstart", "tenants", "create", "acme")
    key = world.create_key("acme-laptop", "acme")
    world.save(12, key)
    world.ops("status", "--wait=120")
    for _number in range(2):
        world.ops("backup")
    yield


# -- the machine


def stray(unit: str, command: str) -> Fault:
    def bring(world: World) -> Iterator[None]:
        world.ssh(f"systemd-run --quiet --unit={unit} {command}")
        time.sleep(5)
        try:
            yield
        finally:
            world.ssh(f"systemctl stop {unit}.service", check=False)

    return bring


fault("search-slow")(stray("stray", "sha256sum /dev/zero"))
fault("log-flood")(stray("talkative", "yes all is well, all is well, all is well"))


@fault("host-metrics-stale")
def _(world: World) -> Iterator[None]:
    world.ssh("systemctl disable --quiet --now warmstart-metrics.timer")
    yield


@fault("docker-down")
def _(world: World) -> Iterator[None]:
    world.ssh("systemctl stop --quiet docker.socket docker.service")
    yield


@fault("disk-full")
def _(world: World) -> Iterator[None]:
    """The data volume becomes a small file system of its own, and a core dump fills it."""
    _stop_writers(world)
    world.ssh(
        f"cp --archive {DATA} {DATA}.kept && mount -t tmpfs -o size=96m,mode=700,uid=10001,gid=10001 small {DATA}"
        f" && cp --archive {DATA}.kept/. {DATA}/"
    )
    _start_writers(world)
    world.ssh(f"dd if=/dev/zero of={DATA}/core.4711 bs=1M 2>/dev/null; dd if=/dev/zero of={DATA}/core.4711 bs=1 "
              "oflag=append conv=notrunc count=8192 2>/dev/null; true")  # fmt: skip
    try:
        yield
    finally:
        _stop_writers(world)
        world.ssh(
            f"rm -rf {DATA}.kept && cp --archive {DATA} {DATA}.kept && umount {DATA}"
            f" && find {DATA} -mindepth 1 -delete && cp --archive {DATA}.kept/. {DATA}/ && rm -rf {DATA}.kept"
        )
        _start_writers(world)


def _stop_writers(world: World) -> None:
    world.ssh("warmstart-vm compose --profile b stop api api-b worker")


def _start_writers(world: World) -> None:
    world.ssh(
        "docker ps --all --quiet --filter label=com.docker.compose.project=warmstart --filter status=exited"
        " | xargs --no-run-if-empty docker start"
    )
    world.until_status("ready", lambda s: s["ready"].get("status") == "ok")


@fault("certificate-expiring")
def _(world: World) -> Iterator[None]:
    """A certificate near its end, in a folder that caddy can't write to."""
    world.ssh(_OLD_CERTIFICATE)
    world.until_status("it is shown", lambda s: "until" in s["certificate"])
    yield


_CADDY: Final = "/var/lib/docker/volumes/warmstart_caddy/_data/data/caddy"
_OLD_CERTIFICATE: Final = rf"""
set -e
cd {_CADDY}
ca=pki/authorities/local
docker stop warmstart-caddy-1 >/dev/null
site=$(ls -d certificates/local/*/ | head -1)
name=$(basename $site)
key=$site$name.key
work=$(mktemp -d)
cat > $work/ext <<END
basicConstraints=critical,CA:false
keyUsage=critical,digitalSignature
extendedKeyUsage=serverAuth
subjectAltName=IP:{HOST}
END
moment() {{ date --utc --date="$1" +%Y%m%d%H%M%SZ; }}
openssl req -new -key $key -subj / -out $work/csr
openssl x509 -req -in $work/csr -CA $ca/intermediate.crt -CAkey $ca/intermediate.key -set_serial 4711 \
  -extfile $work/ext -not_before $(moment '-11 hours') -not_after $(moment '+50 minutes') -out $work/crt
cat $work/crt $ca/intermediate.crt > $site$name.crt
rm -r $work
chown --recursive 0:0 certificates locks 2>/dev/null || true
chmod --recursive a+rX certificates
docker start warmstart-caddy-1 >/dev/null
"""


# -- what is told, kept, locked


@fault("backup-failed")
def _(world: World) -> Iterator[None]:
    world.ssh(
        "sed -i '/^OFFSITE_REPOSITORY=/d' /etc/warmstart/backup.env"
        " && echo OFFSITE_REPOSITORY=sftp:backup@127.0.0.1:/gone >> /etc/warmstart/backup.env"
    )
    world.ops("backup", ok=False)
    yield


@fault("drill-failed")
def _(world: World) -> Iterator[None]:
    world.ops("backup")
    world.ssh("find /var/backups/warmstart/data -type f -size +8k -delete")
    world.ops("drill", ok=False)
    yield


@fault("deploy-lock-stale")
def _(world: World) -> Iterator[None]:
    held = {
        "who": "ann@laptop", "machine": "0" * 16, "pid": 4711, "since": time.time() - 5400, "beat": time.time() - 5000,
        "step": "rollout", "commit": "0" * 40, "token": "0" * 32,
    }  # fmt: skip
    world.machine.ssh("cat > /run/warmstart/deploy.lock", stdin=json.dumps(held).encode())
    yield


# -- tasks


@fault("rotate-secrets-and-keys")
def _(world: World) -> Iterator[None]:
    world.create_key("laptop")
    yield


@fault("load-test-before-release")
def _(world: World) -> Iterator[None]:
    """A version that was not put under load yet."""
    assert not (world.tree.path / ".cache" / "loadtests").exists()
    yield


@fault("upgrade-and-rollback")
def _(world: World) -> Iterator[None]:
    before = world.tree.commit_id
    file = world.origin.path / "compose" / "compose.yml"
    file.write_text(file.read_text().replace("RESIDENT_MB:-128", "RESIDENT_MB:-120"))
    world.origin.commit("Another version")
    try:
        yield
    finally:
        git(world.origin.path, "reset", "--quiet", "--hard", before)
        git(world.tree.path, "reset", "--quiet", "--hard", before)


#: A real model that is cut to its first numbers: of another width, and found by all the same.
NARROW: Final = 256
_CUT: Final = f"""\
import asyncio, tei_stand_in as stand_in
whole = stand_in.Weights.embed
def cut(self, text):
    vector, tokens = whole(self, text)
    return vector[:{NARROW}], tokens
stand_in.Weights.embed = cut
asyncio.run(stand_in.serve(stand_in.Settings()))
"""


@contextmanager
def _another_space(world: World) -> Iterator[None]:
    """Afterwards the vectors are those of before, and no dump is left."""
    try:
        yield
    finally:
        world.own_fields = {}
        world.set_fields({})
        world.ops("migrate-dimension", "--rollback")
        world.ssh(f"rm -rf {DATA}/lancedb/migrations")


@fault("migrate-embedding-dimension")
def _(world: World) -> Iterator[Mapping[str, str]]:
    tag = "warmstart-vm/tei:narrow"
    with TemporaryDirectory() as folder, _another_space(world):
        (Path(folder) / "narrow.py").write_text(_CUT)
        (Path(folder) / "Dockerfile").write_text(
            f'FROM {build.tag("tei")}\nCOPY narrow.py /opt/model/\nENTRYPOINT ["python3", "-m", "narrow"]\n'
        )
        command("docker", "build", "--quiet", "--tag", tag, folder)
        model = model_folder(Path(folder))
        (model / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": NARROW}))
        world.own_fields = {"image_overrides": {**IMAGES, "embeddings": tag}}
        yield {"folder": str(model), "model": "example/narrow", "revision": "1", "width": str(NARROW)}


@fault("change-embedding-provider")
def _(world: World) -> Iterator[Mapping[str, str]]:
    """The provider is a container on the machine's way out, with a key of its own."""
    image = world.ssh("docker inspect --format '{{.Image}}' warmstart-embeddings-1").strip()
    model = world.ssh("grep ^MODEL_DIR= /etc/warmstart/settings.env").strip().partition("=")[2]
    world.machine.ssh("cat > /run/warmstart/narrow.py", stdin=_CUT.encode())
    with _another_space(world):
        world.ssh(
            "docker run --detach --name provider --network warmstart_edge --tmpfs /tmp --env MODEL_ID=/model"
            f" --env API_KEY=providers-key --env PORT=8080 --volume {model}:/model:ro"
            f" --volume /run/warmstart/narrow.py:/opt/model/narrow.py:ro --entrypoint python3 {image} -m narrow"
        )
        try:
            yield {
                "url": "http://provider:8080/v1", "model": "example/hosted", "width": str(NARROW),
                "key-variable": "PROVIDERS_KEY", "PROVIDERS_KEY": "providers-key",
            }  # fmt: skip
        finally:
            world.ssh("docker rm --force --volumes provider; rm -f /etc/warmstart/secrets-given.json")


@fault("move-to-another-vm")
def _(world: World) -> Iterator[Mapping[str, str]]:
    with world.run_machine("moved") as new, TemporaryDirectory() as folder:
        password = world.ssh("grep ^RESTIC_PASSWORD= /etc/warmstart/backup.env").strip().partition("=")[2]
        file = Path(folder) / "password"
        file.write_text(password.strip("\"'") + "\n")
        inventory = world.write_inventory(new)
        yield {"new": str(inventory), "new-host": HOST, "password-file": str(file)}
