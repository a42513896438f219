"""A scratch machine for modules of ops/vm: its files in a folder, and docker's answers as a real one gave them."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from ops.vm.stack import Stack, VmError

API, WORKER, OLD_WORKER, EMBEDDINGS = "a" * 64, "b" * 64, "c" * 64, "d" * 64


def container(id_: str, service: str, state: str, health: str = "", restarts: int = 0, started: str = "10") -> Any:
    """What `docker inspect` says, as far as it is read."""
    return {
        "Id": id_, "Name": f"/warmstart-{service}-1", "Image": "sha256:" + "e" * 64, "RestartCount": restarts,
        "Config": {"Labels": {"com.docker.compose.service": service}},
        "State": {
            "Status": state, "ExitCode": 0 if state == "running" else 137,
            "StartedAt": f"2026-11-29T{started}:00:00.123456789Z", **({"Health": {"Status": health}} if health else {}),
        },
        "NetworkSettings": {"Networks": {"warmstart_backend": {"IPAddress": "172.30.84.9"}}},
    }  # fmt: skip


CONTAINERS = [
    container(API, "api", "running", "healthy", restarts=2),
    container(WORKER, "worker", "running", "unhealthy", started="12"),
    # what a recreation that was killed leaves behind
    container(OLD_WORKER, "worker", "exited", restarts=7),
    container(EMBEDDINGS, "embeddings", "exited"),
]
STATS = f"{API} 201.5MiB / 512MiB\n{WORKER} 1.25GiB / 2GiB\n"


@dataclass(frozen=True)
class Machine(Stack):
    docker: dict[str, str] = field(default_factory=dict)

    def run(self, command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 0) -> str:
        """The answer to `docker <word>`; a fault where there is none."""
        if command[1] not in self.docker:
            raise VmError("Cannot connect to the Docker daemon")
        return self.docker[command[1]]


def machine(folder: Path, https_port: int = 1) -> Machine:
    answers = {"ps": "\n".join(c["Id"] for c in CONTAINERS), "inspect": json.dumps(CONTAINERS), "stats": STATS}
    made = Machine(root=folder, docker=answers)
    for path in (made.state, made.etc, made.run_dir):
        path.mkdir(parents=True)
    if https_port == 1:
        https_port = tls_server(folder, *default_validity())
    (made.etc / "settings.env").write_text(f'ADDRESS="127.0.0.1"\nHTTPS_PORT={https_port}\n')
    for kind, ok in (("backup", True), ("drill", False)):
        record(made, kind, ok)
    return made


def record(made: Stack, kind: str, ok: bool) -> None:
    """As backups and drills leave it."""
    good = {"at": "2026-11-29T03:17:30+00:00", "ok": True, "seconds": 12.5}
    last = good if ok else {"at": "2026-11-30T03:17:00+00:00", "ok": False, "seconds": 2.0, "reason": "no room"}
    (made.state / f"{kind}.json").write_text(json.dumps({**last, "last_success": good}))


# -- certificates


def default_validity() -> tuple[datetime, datetime]:
    return datetime(2026, 11, 1, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC) + timedelta(days=90)


def certificate(not_before: datetime, not_after: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "memory.example.com")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(not_before).not_valid_after(not_after)
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("memory.example.com")]), critical=False)
    return builder.sign(key, SHA256()), key


def tls_server(folder: Path, not_before: datetime, not_after: datetime) -> int:
    """Shows such a certificate to whoever connects, until the tests end; its port."""
    made, key = certificate(not_before, not_after)
    path = folder / "server.pem"
    path.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + made.public_bytes(Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            plain, _ = listener.accept()
            with plain, contextlib.suppress(OSError):
                context.wrap_socket(plain, server_side=True).close()

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])
