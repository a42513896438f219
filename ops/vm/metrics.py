"""The machine's figures for Prometheus: disk, containers, backups, certificate, deploy lock.

A timer writes them once a minute into a file that a container serves. What can't be had is left out, and the rest is
written: who is watched must not go unwatched for one broken part.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from . import disks as file_systems
from .changes import missing, newest
from .secrets import read
from .stack import Stack, VmError

#: In a folder of its own, which is all that the container sees.
FOLDER: Final = "metrics"
FILE: Final = "host.txt"
#: Since when the machine is watched: from then on, a backup and a drill are due.
SINCE_FILE: Final = "watched-since"
TLS_TIMEOUT_S: Final = 5.0
DOCKER_TIMEOUT_S: Final = 20.0

_UNITS: Final = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

Labels = dict[str, str]
#: name, its help text, labels, value
Sample = tuple[str, str, Labels, float]


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser("metrics", help="the machine's figures for Prometheus")
    parser.add_argument("--print", action="store_true", dest="shown", help="print them instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    text = render(collect(stack))
    if args.shown:
        print(text, end="")
    else:
        write(stack.state / FOLDER / FILE, text)
    return 0


def write(path: Path, text: str) -> None:
    """In one step, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o755)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    new.chmod(0o644)
    new.replace(path)


def render(samples: list[Sample]) -> str:
    """Prometheus' text, all samples of a name together."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample[0], []).append(sample)
    lines = []
    for name, group in by_name.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {group[0][1]}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{_labels(labels)} {value:.17g}" for _, _, labels, value in group]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    escaped = {n: re.sub(r'(["\\])', r"\\\1", v).replace("\n", r"\n") for n, v in labels.items()}
    return "{" + ",".join(f'{n}="{v}"' for n, v in escaped.items()) + "}" if labels else ""


def collect(stack: Stack) -> list[Sample]:
    parts: list[Callable[[Stack], Iterator[Sample]]] = [disks, containers, results, certificate, deploy_lock]
    samples: list[Sample] = []
    broken = []
    for part in parts:
        try:
            samples += part(stack)
        except Exception as error:  # whatever it is, the others go on
            broken.append(part.__name__)
            print(f"{part.__name__}: {error}"[:500], flush=True)  # into the journal
    for part in parts:
        text = "1 where this part of the machine's figures could be had."
        samples.append(("warmstart_host_metrics_ok", text, {"part": part.__name__}, part.__name__ not in broken))
    samples.append(("warmstart_host_metrics_timestamp_seconds", "When these figures were taken.", {}, time.time()))
    return samples


# -- disk


def disks(stack: Stack) -> Iterator[Sample]:
    for disk in file_systems.disks(stack):
        yield "warmstart_host_disk_size_bytes", "Size of the file system.", {"mount": disk.mount}, disk.size
        yield "warmstart_host_disk_free_bytes", "Space that is left on it.", {"mount": disk.mount}, disk.free


# -- containers


def containers(stack: Stack) -> Iterator[Sample]:
    up_text = "1 where docker answers."
    try:
        # of a service that is being made anew, the one that counts
        by_service = newest(stack.containers())
        found = list(by_service.values())
        stats = stack.run(
            ["docker", "stats", "--no-stream", "--no-trunc", "--format", "{{.ID}} {{.MemUsage}}",
             *(c.id for c in found if c.running)],
            timeout_s=DOCKER_TIMEOUT_S,
        ) if any(c.running for c in found) else ""  # fmt: skip
    except VmError as error:
        yield "warmstart_docker_up", up_text, {}, 0
        print(f"docker: {error}"[:500], flush=True)
        return
    yield "warmstart_docker_up", up_text, {}, 1
    up_is = "1 where it runs, is not unhealthy, and is on a network."
    for service in missing(stack, by_service):
        yield "warmstart_container_up", up_is, {"service": service}, 0
    services = {c.id: c.service for c in found}
    for each in found:
        labels = {"service": each.service}
        up = each.running and each.health != "unhealthy" and not each.detached
        yield "warmstart_container_up", up_is, labels, up
        yield "warmstart_container_restarts_total", "Restarts by docker since it was made.", labels, each.restarts
    for container_id, used, limit in memory(stats):
        labels = {"service": services[container_id]}
        yield "warmstart_container_memory_bytes", "Memory in use, without what can be dropped.", labels, used
        yield "warmstart_container_memory_limit_bytes", "Past this it is killed.", labels, limit


def memory(stats: str) -> Iterator[tuple[str, float, float]]:
    """From lines such as `<id> 25.41MiB / 512MiB`."""
    for line in stats.splitlines():
        container_id, _, rest = line.partition(" ")
        sizes = [float(n) * _UNITS[unit.upper()] for n, unit in re.findall(r"([\d.]+)\s*([A-Za-z]+)", rest)]
        if len(sizes) == 2:
            yield container_id, sizes[0], sizes[1]


# -- backups and drills


def results(stack: Stack) -> Iterator[Sample]:
    """What the last backup and the last drill left behind."""
    for kind in ("backup", "drill"):
        path = stack.state / f"{kind}.json"
        last = json.loads(path.read_text()) if path.exists() else {}
        success = last.get("last_success")
        at = _seconds(success["at"]) if success else _watched_since(stack)
        text = f"When the last good {kind} ended; without one, when the machine was first looked at."
        yield f"warmstart_{kind}_success_timestamp_seconds", text, {}, at
        if not last:
            continue
        yield f"warmstart_{kind}_ok", f"1 where the last {kind} was a success.", {}, last["ok"] is True
        yield f"warmstart_{kind}_duration_seconds", f"How long the last {kind} took.", {}, float(last["seconds"])


def _watched_since(stack: Stack) -> float:
    path = stack.state / FOLDER / SINCE_FILE
    if not path.exists():
        write(path, f"{time.time():.0f}\n")
    return float(path.read_text())


def _seconds(at: str) -> float:
    moment = datetime.fromisoformat(at)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


# -- the certificate


def certificate(stack: Stack) -> Iterator[Sample]:
    """Of what a client on this machine is shown, whoever signed it."""
    settings = read(stack.etc / "settings.env")
    name = settings.get("DOMAIN") or settings.get("ADDRESS") or "localhost"
    bind = settings.get("BIND_ADDRESS", "")
    host = "127.0.0.1" if bind in ("", "0.0.0.0") else bind  # noqa: S104 - no address to connect to
    up_text = "1 where a TLS connection to the HTTPS port can be made from the machine."
    try:
        der = shown_certificate(host, int(settings.get("HTTPS_PORT") or 443), name)
    except OSError as error:
        yield "warmstart_https_up", up_text, {}, 0
        print(f"https: {error}"[:500], flush=True)
        return
    yield "warmstart_https_up", up_text, {}, 1
    not_before, not_after = validity(der)
    yield "warmstart_certificate_not_before_timestamp_seconds", "From when the certificate is good.", {}, not_before
    yield "warmstart_certificate_not_after_timestamp_seconds", "Until when it is.", {}, not_after


def shown_certificate(host: str, port: int, name: str) -> bytes:
    """DER. It is only looked at, so nothing is verified: one that ran out must be seen, too."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # an address is no name that may be asked for
    asked = None if re.fullmatch(r"[\d.]+|.*:.*", name) else name
    with (
        socket.create_connection((host, port), TLS_TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=asked) as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
    if not shown:
        raise OSError("the server showed no certificate")
    return shown


def validity(der: bytes) -> tuple[float, float]:
    """notBefore and notAfter of a certificate, as times of Unix. Raises ValueError where it is none.

    The standard library reads them only of certificates that it verifies.
    """
    tag, body, _ = _element(der)  # Certificate
    _, body, _ = _element(body)  # TBSCertificate
    fields = []
    while body:
        tag, value, body = _element(body)
        if tag != 0xA0:  # the version, which need not be there
            fields.append(value)
    if len(fields) < 4:
        raise ValueError("not a certificate")
    rest = fields[3]  # after serialNumber, signature, issuer
    times = []
    while rest:
        tag, value, rest = _element(rest)
        times.append(_time(tag, value.decode("ascii")))
    before, after = times
    return before, after


def _element(data: bytes) -> tuple[int, bytes, bytes]:
    """Tag, content and what follows, of DER."""
    if len(data) < 2:
        raise ValueError("the certificate ends too soon")
    tag, length, start = data[0], data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start], "big")
    if start + length > len(data):
        raise ValueError("the certificate ends too soon")
    return tag, data[start : start + length], data[start + length :]


def _time(tag: int, text: str) -> float:
    if tag == 0x17:  # UTCTime: two digits of the year, from 1950 on
        text = ("19" if int(text[:2]) >= 50 else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


# -- the deploy lock


def deploy_lock(stack: Stack) -> Iterator[Sample]:
    """0 where nobody deploys."""
    path, beat = stack.run_dir / "deploy.lock", 0.0
    if path.exists():
        try:
            beat = float(json.loads(path.read_text())["beat"])
        except (ValueError, KeyError, TypeError):
            # who was killed while writing it left it as it is
            beat = path.stat().st_mtime
    text = "Last sign of life of the deploy that holds the lock; 0: there is none."
    yield "warmstart_deploy_lock_beat_timestamp_seconds", text, {}, beat
