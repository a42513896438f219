"""Asks the registries for the digest each pinned tag has now. Exit 1: one has moved on; 2: one was not reached."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final, NamedTuple

PINS: Final = Path(__file__).resolve().parent / "pins.toml"
TIMEOUT_S: Final = 30


class Unreachable(Exception):
    pass


class Pin(NamedTuple):
    name: str
    tag: str
    digest: str

    @property
    def reference(self) -> str:
        return f"{self.tag}@{self.digest}"


def pins(path: Path = PINS) -> list[Pin]:
    return [
        Pin(name, f"{entry['image']}:{entry['tag']}", entry["digest"])
        for name, entry in tomllib.loads(path.read_text()).items()
    ]


def current_digest(tag: str) -> str:
    command = ["docker", "buildx", "imagetools", "inspect", tag, "--format", "{{.Manifest.Digest}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise Unreachable("docker with buildx is not installed here") from None
    except subprocess.TimeoutExpired:
        raise Unreachable(f"no answer within {TIMEOUT_S} s") from None
    if done.returncode:
        raise Unreachable((done.stderr.strip().splitlines() or ["no reason given"])[-1])
    return done.stdout.strip()


def main() -> int:
    moved = unreached = 0
    for pin in pins():
        try:
            now = current_digest(pin.tag)
        except Unreachable as error:
            unreached += 1
            print(f"?     {pin.name}: {pin.tag}: {error}")
            continue
        if now == pin.digest:
            print(f"same  {pin.name}: {pin.tag}")
        else:
            moved += 1
            print(f"moved {pin.name}: {pin.tag}: pinned {pin.digest}, now {now}")
    if moved:
        print("What moved was rebuilt; the pinned digest still works. A new one goes into pins.toml and compose.yml.")
    if unreached:
        print(f"{unreached} not verified: try again on a machine that reaches these registries.", file=sys.stderr)
    return 1 if moved else 2 if unreached else 0


if __name__ == "__main__":
    sys.exit(main())
