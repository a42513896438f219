"""What of a release is not so on this machine yet: containers, and files that they mount. Looks, never changes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .stack import APP_SERVICES, SLOTS, Container, Refused, Release, Stack, VmError

#: Last of those that come before the api: the traffic's rules may need what the others give.
CADDY: Final = "caddy"
#: Of the folder that caddy mounts, what is a roll-out's and no release's.
STATE_FOLDER: Final = Path("caddy/traffic")


@dataclass(frozen=True)
class Wanted:
    """A service as a release has it."""

    config_hash: str
    image_id: str

    def difference(self, found: Container | None) -> str:
        """Why `found` must be replaced or started; empty where it is as it should be."""
        if found is None:
            return "missing"
        if found.image_id != self.image_id:
            return "another image"
        if found.config_hash != self.config_hash:
            return "other settings"
        if found.detached:
            return "on no network"
        return "" if found.running else f"{found.state}, exit code {found.exit_code}"


def wanted(stack: Stack, release: Release) -> dict[str, Wanted]:
    """By service: those that the settings' profiles have, and the api's second slot. Raises Refused."""
    images = image_ids(stack, release)
    second = SLOTS[1]
    lines = stack.run(stack.compose(release, "config", "--hash", "*")).splitlines()
    lines += stack.run(stack.compose(release, "--profile", "*", "config", "--hash", second)).splitlines()
    hashes = dict(line.split() for line in lines if line.strip())
    if missing := sorted(hashes.keys() - images.keys()):
        raise Refused(f"release {release.id} names no image for {', '.join(missing)}: deploy it again")
    return {service: Wanted(value, images[service]) for service, value in sorted(hashes.items())}


def image_ids(stack: Stack, release: Release) -> dict[str, str]:
    """By service, each found here under its name and with the id of the manifest. Raises Refused."""
    names = sorted({image.name for image in release.images.values()})
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = stack.run(["docker", "image", "inspect", "--format", "{{.Id}}", name]).strip()
        except VmError:
            found[name] = ""
    faults = []
    for service, image in sorted(release.images.items()):
        if not found[image.name]:
            faults.append(f"{service}: {image.name} is not on this machine")
        elif image.id and image.id != found[image.name]:
            faults.append(f"{service}: {image.name} is {found[image.name]} here, the release has {image.id}")
    if faults:
        raise Refused(f"images of release {release.id}: " + "; ".join(faults) + ": deploy it again")
    return {service: found[image.name] for service, image in release.images.items()}


def newest(found: Sequence[Container]) -> dict[str, Container]:
    """By service, the one that counts: the running, then the later one."""
    return {c.service: c for c in sorted(found, key=lambda c: (c.running, c.started_at))}


def missing(stack: Stack, found: Mapping[str, Container]) -> list[str]:
    """Services of the current release that have no container at all, not even one that ended."""
    release = stack.current()
    if release is None:
        return []
    expected = set(stack.run(stack.compose(release, "config", "--services")).split()) - set(SLOTS)
    return sorted((expected | {stack.serving()}) - found.keys())


def before_the_api(services: Mapping[str, Wanted]) -> list[str]:
    """Those that a release brings up before its api, in order."""
    return sorted(services.keys() - set(APP_SERVICES), key=lambda service: (service == CADDY, service))


def stale_files(stack: Stack, release: Release) -> dict[Path, bytes | None]:
    """By path under the config folder: what is to be written there, None where it is to go."""
    source = release.folder / "compose"
    ours = {f.relative_to(source): f.read_bytes() for f in source.glob("*/**/*") if f.is_file()}
    there = {f.relative_to(stack.config): f for f in stack.config.glob("*/**/*") if f.is_file()}
    stale: dict[Path, bytes | None] = {
        path: text for path, text in ours.items() if path not in there or there[path].read_bytes() != text
    }
    gone = (path for path in there if path not in ours and STATE_FOLDER not in path.parents)
    return {**stale, **dict.fromkeys(gone)}


def caddy_has_loaded_its_file(stack: Stack, caddy: Container) -> bool:
    """Whether the rules it goes by are those of the file that it mounts."""
    loaded = stack.run(["docker", "exec", caddy.id, "wget", "-q", "-O", "-", "http://127.0.0.1:2019/config/"])
    file = stack.run(["docker", "exec", caddy.id, "caddy", "adapt", "--config", "/etc/caddy/Caddyfile"])
    return bool(json.loads(loaded) == json.loads(file))


def left_over(services: Mapping[str, Wanted], found: Mapping[str, Container], serving: str) -> list[str]:
    """What runs beside what is to run: the other slot, and services that are no part of it any more."""
    return sorted(name for name in found if name not in services or (name in SLOTS and name != serving))


@dataclass(frozen=True)
class Pending:
    """What a roll-out of a release would change, each with the reason."""

    release: str
    #: by `services`
    services: dict[str, str]
    files: list[str]
    #: by `rollout`, which also takes away what is left over
    app: dict[str, str]
    #: none, or unknown: only the new image can tell
    migrations: str
    rolled_out: bool

    @property
    def serves(self) -> bool:
        """Whether there is nothing for `rollout` to do."""
        return self.rolled_out and not self.app


def pending(stack: Stack, release: Release) -> Pending:
    services = wanted(stack, release)
    found = newest(stack.containers())
    serving = stack.serving()
    differences = {
        name: what for name, one in services.items() if name not in SLOTS and (what := one.difference(found.get(name)))
    }
    api = services[serving].difference(found.get(serving))
    app = {name: what for name, what in differences.items() if name in APP_SERVICES} | ({SLOTS[0]: api} if api else {})
    files = [str(path) for path in sorted(stale_files(stack, release))]
    caddy = found.get(CADDY)
    if CADDY not in differences and not files and caddy and not caddy_has_loaded_its_file(stack, caddy):
        files = ["caddy/Caddyfile"]
    current = stack.current()
    return Pending(
        release=release.id,
        services={name: what for name, what in differences.items() if name not in APP_SERVICES},
        files=files,
        app=app | dict.fromkeys(left_over(services, found, serving), "left over"),
        migrations="unknown" if api else "none",
        rolled_out=current is not None and current.id == release.id,
    )
