"""`warmstart-vm status`: what runs, since when, and how it is."""

from __future__ import annotations

import argparse
import http.client
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from .changes import CADDY, missing, newest
from .disks import fullest
from .gate import API_PORT
from .metrics import memory, shown_certificate, validity
from .secrets import read
from .stack import SLOTS, Container, Stack, VmError

ASK_TIMEOUT_S: Final = 5.0
DOCKER_TIMEOUT_S: Final = 30.0
WORKER_PORT: Final = 8485
QUEUE_METRICS: Final = {
    "waiting": "queued_memories", "failed": "failed_memories", "age_seconds": "queue_age_seconds",
    "compaction_lag_seconds": "compaction_lag_seconds",
}  # fmt: skip
#: Between two looks of `--wait`.
POLL_S: Final = 2.0
#: OPTIMIZE_AFTER_S and a moment; sooner it is nobody's concern.
COMPACTION_DUE_S: Final = 360.0
#: Of its limit; an alert has the same.
MEMORY_SHARE: Final = 0.9
HISTORY_FILE: Final = "deploys.jsonl"


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser("status", help="what runs, since when, and how it is")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="until all is well and no memory waits, at most"
    )
    parser.set_defaults(run=_status)


def _status(args: argparse.Namespace) -> int:
    stack, deadline = Stack.from_environment(), time.monotonic() + args.wait
    while not is_settled(found := collect(stack)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    print(json.dumps(found) if args.json else "\n".join(render(found, time.time())))
    return 0 if found["ok"] else 1


# -- what there is to say


def collect(stack: Stack) -> dict[str, Any]:
    """Each part for itself: one that can't be had is told as {"error": …}, and the rest stands."""
    parts: dict[str, Callable[[Stack], Any]] = {
        "release": release, "deploy": last_deploy, "containers": containers, "ready": readiness, "queue": queue,
        "backup": lambda stack: last_result(stack, "backup"), "drill": lambda stack: last_result(stack, "drill"),
        "certificate": certificate, "disk": disk, "lock": lock,
    }  # fmt: skip
    found: dict[str, Any] = {}
    for name, part in parts.items():
        try:
            found[name] = part(stack)
        except (OSError, ValueError, KeyError, VmError, http.client.HTTPException) as error:
            found[name] = {"error": str(error) or type(error).__name__}
    wrong = faults(found)
    return {"ok": not wrong, "faults": wrong, **found}


def is_settled(found: Mapping[str, Any]) -> bool:
    return bool(found["ok"] and not found["queue"].get("waiting", 1))


def faults(found: Mapping[str, Any]) -> list[str]:
    """What is wrong, in a few words each: nothing rolled out, containers that are not up, an api that is degraded."""
    wrong = [] if found["release"] else ["nothing was rolled out"]
    listed, ready = found["containers"], found["ready"] or {}
    if not isinstance(listed, list):
        # without docker nothing else can be asked
        return [*wrong, "docker does not answer"]
    if found["disk"].get("full"):  # first, since it can be what ended the others
        wrong.append(f"the disk is full ({found['disk']['mount']})")
    wrong += [f"{c['service']} is {_state(c)}" for c in listed if c["state"] != "running"]
    wrong += [f"{c['service']} is on no network" for c in listed if c["detached"] and c["state"] == "running"]
    wrong += [f"{c['service']} is unhealthy" for c in listed if c["health"] == "unhealthy" and c["state"] == "running"]
    if ready.get("status") != "ok":
        degraded = ready.get("degraded") or {}
        wrong.append(f"the api goes without {', '.join(degraded)}" if degraded else "the api does not answer")
    served = any(c["service"] == CADDY and c["state"] == "running" and not c["detached"] for c in listed)
    if served and "error" in (found["certificate"] or {}):
        wrong.append("https does not answer")
    return wrong


def _state(container: Mapping[str, Any]) -> str:
    state = str(container["state"])
    return f"{state} ({container['exit_code']})" if state == "exited" else state


def release(stack: Stack) -> dict[str, Any] | None:
    current, previous = stack.current(), stack.previous()
    if current is None:
        return None
    about = current.manifest
    link = (stack.opt / "current").lstat()
    return {
        "id": current.id, "commit": about.get("commit", ""), "who": about.get("who", ""), "made": about.get("when", ""),
        "since": datetime.fromtimestamp(link.st_mtime, UTC).isoformat(timespec="seconds"),
        "previous": previous.id if previous else "",
    }  # fmt: skip


def last_deploy(stack: Stack) -> dict[str, Any] | None:
    """The last one that changed something."""
    path = stack.state / HISTORY_FILE
    lines = path.read_text().splitlines() if path.exists() else []
    if not lines:
        return None
    last = json.loads(lines[-1])
    return {"at": last["at"], "who": last["who"], "commit": last["commit"], "changes": len(last["changes"])}


def containers(stack: Stack) -> list[dict[str, Any]]:
    by_service = newest(stack.containers())
    found = sorted(by_service.values(), key=lambda c: c.service)
    running = [c.id for c in found if c.running]
    used: dict[str, tuple[float, float]] = {}
    if running:
        words = ["docker", "stats", "--no-stream", "--no-trunc", "--format", "{{.ID}} {{.MemUsage}}", *running]
        used = {c: (mine, limit) for c, mine, limit in memory(stack.run(words, timeout_s=DOCKER_TIMEOUT_S))}
    gone = [Container("", "", name, "missing", "", 0, 0, "", "", "", "", {}) for name in missing(stack, by_service)]
    return [_container(c, *used.get(c.id, (None, None))) for c in [*found, *gone]]


def _container(found: Container, used: float | None, limit: float | None) -> dict[str, Any]:
    return {
        "service": found.service, "state": found.state, "health": found.health, "restarts": found.restarts,
        "exit_code": found.exit_code, "started_at": found.started_at, "release": found.release,
        "memory_bytes": used, "memory_limit_bytes": limit, "detached": found.detached,
    }  # fmt: skip


def readiness(stack: Stack) -> dict[str, Any]:
    """What the api that has the traffic says of itself."""
    api = stack.container(SLOTS[0])
    if api is None or not api.running:
        raise VmError("no api runs")
    return {**json.loads(_ask(api, API_PORT, "/readyz")), "slot": api.service}


def queue(stack: Stack) -> dict[str, float]:
    """Memories without a vector, as the worker counted them last."""
    worker = stack.container("worker")
    if worker is None or not worker.running:
        raise VmError("the worker does not run")
    found = dict(re.findall(r"^warmstart_(\w+) ([\d.e+]+)$", _ask(worker, WORKER_PORT, "/metrics"), re.MULTILINE))
    return {name: float(found[metric]) for name, metric in QUEUE_METRICS.items()}


def _ask(container: Container, port: int, path: str) -> str:
    connection = http.client.HTTPConnection(container.addresses["backend"], port, timeout=ASK_TIMEOUT_S)
    try:
        # it answers to its own machine's names
        connection.request("GET", path, headers={"Host": "127.0.0.1"})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def last_result(stack: Stack, kind: str) -> dict[str, Any] | None:
    path = stack.state / f"{kind}.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def certificate(stack: Stack) -> dict[str, Any]:
    settings = read(stack.etc / "settings.env")
    name = settings.get("DOMAIN") or settings.get("ADDRESS") or "localhost"
    bind = settings.get("BIND_ADDRESS", "")
    host = "127.0.0.1" if bind in ("", "0.0.0.0") else bind  # noqa: S104 - no address to connect to
    _, until = validity(shown_certificate(host, int(settings.get("HTTPS_PORT") or 443), name))
    return {"name": name, "until": datetime.fromtimestamp(until, UTC).isoformat(timespec="seconds")}


def disk(stack: Stack) -> dict[str, Any]:
    """The fullest of those that are written to."""
    found = fullest(stack)
    return {"mount": found.mount, "size_bytes": found.size, "free_bytes": found.free, "full": found.is_full}


def lock(stack: Stack) -> dict[str, Any] | None:
    """Who deploys."""
    path = stack.run_dir / "deploy.lock"
    if not path.exists():
        return None
    held = json.loads(path.read_text())
    return {name: held.get(name) for name in ("who", "since", "step", "beat", "commit")}


# -- for people


def render(found: Mapping[str, Any], now: float) -> list[str]:
    state = "ok" if found["ok"] else f"NOT OK: {'; '.join(found['faults'])}"
    lines = [_line("service", state), _line("release", _release(found["release"], now))]
    lines += [_line("deploy", text) for text in _deploy(found["deploy"], now)]
    lines += [_line("ready", _ready(found["ready"])), _line("queue", _queue(found["queue"]))]
    lines += [_line("memory", _tight(found["containers"]))]
    lines += [_line("certificate", _certificate(found["certificate"], now))]
    lines += [_line(kind, _result(found[kind], now)) for kind in ("backup", "drill")]
    lines += [_line("disk", _disk(found["disk"])), _line("lock", _lock(found["lock"], now)), ""]
    return lines + _table(found["containers"], now)


def _line(name: str, text: str) -> str:
    return f"{name:<12} {text}"


def _error(part: Any) -> str | None:
    """What went wrong with a part, of which the first line is enough."""
    if isinstance(part, Mapping) and set(part) == {"error"}:
        return "can't be told: " + str(part["error"]).partition("\n")[0]
    return None


def _release(part: Any, now: float) -> str:
    if text := _error(part):
        return text
    if not part:
        return "none was rolled out yet"
    before = f"; before it {part['previous']}" if part["previous"] else ""
    return f"{part['id']}, for {ago(part['since'], now)}, by {part['who'] or 'unknown'}{before}"


def _deploy(part: Any, now: float) -> list[str]:
    if text := _error(part):
        return [text]
    return [f"{ago(part['at'], now)} ago by {part['who']}, {part['changes']} changes"] if part else []


def _ready(part: Any) -> str:
    if text := _error(part):
        return text
    told = {
        name: value for name, value in part.items() if name not in ("status", "slot") and value not in ([], {}, None)
    }
    rest = ", ".join(f"{name} {_short(value)}" for name, value in told.items())
    return f"{part.get('status', 'unknown')}, by {part['slot']}" + (f": {rest}" if rest else "")


def _queue(part: Any) -> str:
    if text := _error(part):
        return text
    waiting = f"{part['waiting']:.0f} memories wait for their vector, for up to {span(part['age_seconds'])}"
    failed = f"{part['failed']:.0f} given up" if part["failed"] else ""
    lag = part["compaction_lag_seconds"]
    late = f"not compacted for {span(lag)}" if lag > COMPACTION_DUE_S else ""
    return ", ".join(filter(None, (waiting if part["waiting"] else "empty", failed, late)))


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{name} {_short(each)}" for name, each in value.items()) + ")"
    return "+".join(map(_short, value)) if isinstance(value, list) else str(value)


def _tight(part: Any) -> str:
    if text := _error(part):
        return text
    shares = {c["service"]: c["memory_bytes"] / c["memory_limit_bytes"] for c in part if c["memory_bytes"] is not None}
    full = [f"{service} uses {share:.0%} of its limit" for service, share in shares.items() if share > MEMORY_SHARE]
    return ", ".join(full) or "no container is near its limit"


def _certificate(part: Any, now: float) -> str:
    if text := _error(part):
        return text
    left = datetime.fromisoformat(part["until"]).timestamp() - now
    return f"{part['name']}, " + (f"good for {span(left)}" if left > 0 else f"RAN OUT {span(-left)} ago")


def _result(part: Any, now: float) -> str:
    if text := _error(part):
        return text
    if not part:
        return "none yet"
    when = f"{ago(part['at'], now)} ago, in {part.get('seconds', 0):.0f} s"
    return f"ok, {when}" if part["ok"] else f"FAILED {when}: {part.get('part', '')}: {part.get('reason', '')}"


def _disk(part: Any) -> str:
    if text := _error(part):
        return text
    return f"{part['free_bytes'] / 1e9:.1f} GB free of {part['size_bytes'] / 1e9:.1f} GB ({part['mount']})"


def _lock(part: Any, now: float) -> str:
    if text := _error(part):
        return text
    if not part:
        return "nobody deploys"
    return f"held by {part['who']}, at the step {part['step']}, last heard of {span(now - (part['beat'] or now))} ago"


def _table(part: Any, now: float) -> list[str]:
    if text := _error(part):
        return [_line("containers", text)]
    rows = [("SERVICE", "STATE", "HEALTH", "UP", "RESTARTS", "MEMORY", "RELEASE")]
    for each in part:
        up = each["state"] == "running"
        rows.append((
            each["service"], _state(each), each["health"] or "-",
            ago(each["started_at"], now) if up else "-", str(each["restarts"]), _memory(each), each["release"],
        ))  # fmt: skip
    return _aligned(rows)


def _memory(each: Mapping[str, Any]) -> str:
    used, limit = each["memory_bytes"], each["memory_limit_bytes"]
    return f"{used / 2**20:.0f} of {limit / 2**20:.0f} MB" if used is not None else "-"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def ago(at: str, now: float) -> str:
    # Docker has nanoseconds, which Python doesn't read
    moment = datetime.fromisoformat(f"{at[:19]}+00:00" if at.endswith("Z") else at)
    return span(now - (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def span(seconds: float) -> str:
    """In the largest unit of which there are two."""
    seconds = max(0, round(seconds))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
