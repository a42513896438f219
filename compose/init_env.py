"""Before a start: writes compose/.env where there is none (mode 0600, new secrets); else names all its faults."""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
SECRETS: Final = ("REDIS_PASSWORD", "UPSTASH_REDIS_REST_TOKEN", "OPENAI_API_KEY", "POSTGRES_PASSWORD")
PREFIXES: Final = ("EMBED_DOC_PREFIX", "EMBED_QUERY_PREFIX")


def fill(example: str) -> str:
    """`example` with a value for each empty secret. Hexadecimal: they stand in URLs and in files unquoted."""
    for name in SECRETS:
        example = re.sub(rf"^{name}=$", f"{name}={secrets.token_hex(24)}", example, flags=re.MULTILINE)
    return example


def read(text: str) -> dict[str, str]:
    """Values as they are written, quotes included."""
    return dict(re.findall(r"^([A-Z][A-Z0-9_]*)=(.*)$", text, flags=re.MULTILINE))


def faults(path: Path) -> list[str]:
    values = read(path.read_text())
    found = []
    if path.stat().st_mode & 0o077:
        found.append(f"others may read it, and it holds secrets: chmod 600 {path}")
    needed = ["REDIS_PASSWORD", "UPSTASH_REDIS_REST_TOKEN", "OPENAI_API_KEY", "DATABASE_URL", "MODEL_DIR"]
    if "postgres" in values.get("COMPOSE_PROFILES", "").split(","):
        needed.append("POSTGRES_PASSWORD")
    found += [f"{name} is not set: see .env.example" for name in needed if not values.get(name, "").strip("\"'")]
    if not values.get("DOMAIN") and not values.get("ADDRESS"):
        found.append("DOMAIN and ADDRESS are both empty: set the domain, or the address that clients use")
    e5 = "e5-" in (values.get("EMBED_MODEL") or "e5-")
    for name in PREFIXES:
        value = values.get(name, "")
        if e5 and value and not re.fullmatch(r'"[^"]* "', value):
            found.append(f"{name} is {value}: e5 needs its trailing blank, and so double quotes, as in .env.example")
    model = values.get("MODEL_DIR", "").strip("\"'")
    if model and not (path.parent / model / "config.json").is_file():
        found.append(f"MODEL_DIR: there is no model in {path.parent / model}: .env.example says how to fetch it")
    return found


def main(folder: Path = HERE) -> int:
    target = folder / ".env"
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(file, "w") as out:
            out.write(fill((HERE / ".env.example").read_text()))
        print(f"Wrote {target} with new secrets")
    found = faults(target)
    for fault in found:
        print(f"Error: {target}: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
