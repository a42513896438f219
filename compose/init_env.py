"""Writes compose/.env from .env.example, mode 0600, with new secrets; one that exists is left as it is."""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
SECRETS: Final = ("REDIS_PASSWORD", "UPSTASH_REDIS_REST_TOKEN", "OPENAI_API_KEY", "POSTGRES_PASSWORD")


def fill(example: str) -> str:
    """`example` with a value for each empty secret. Hexadecimal: they stand in URLs and in files unquoted."""
    for name in SECRETS:
        example = re.sub(rf"^{name}=$", f"{name}={secrets.token_hex(24)}", example, flags=re.MULTILINE)
    return example


def main(folder: Path = HERE) -> int:
    target = folder / ".env"
    try:
        file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if target.stat().st_mode & 0o077:
            print(f"{target} holds secrets and others may read it: chmod 600 {target}", file=sys.stderr)
            return 1
        return 0
    with os.fdopen(file, "w") as out:
        out.write(fill((HERE / ".env.example").read_text()))
    print(f"Wrote {target}: see in it where the memory is reached, and where the model's files are")
    return 0


if __name__ == "__main__":
    sys.exit(main())
