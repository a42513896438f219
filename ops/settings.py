"""The settings file of the VM: what compose/.env.example has, less its secrets, with the inventory's values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from compose.init_env import PREFIXES, read
from ops.inventory import SECRET_NAMES, Target
from ops.runner import Refused

FILE: Final = "/etc/warmstart/settings.env"
PLAIN: Final = re.compile(r"[A-Za-z0-9_./:@,+=-]*")
#: Setting → the secret that goes with it: of somebody else's service, so it can't be made here.
FOREIGN: Final = {"OPENAI_BASE_URL": "OPENAI_API_KEY", "UPSTASH_REDIS_REST_URL": "UPSTASH_REDIS_REST_TOKEN"}


def text(target: Target, root: Path, model_dir: str) -> str:
    """Raises Refused with all that can't work."""
    values = {n: v for n, v in read((root / "compose" / ".env.example").read_text()).items() if n not in SECRET_NAMES}
    if target.settings.get("EMBED_MODEL"):
        # those of the example are e5's; not set, they follow the model
        values = {n: v for n, v in values.items() if n not in PREFIXES}
    values |= {name: quoted(name, value) for name, value in target.settings.items()}
    values |= {
        "DOMAIN": target.domain,
        "ADDRESS": target.address,
        "MODEL_DIR": model_dir,
        "COMPOSE_PROFILES": "postgres" if target.postgres else "",
        "HTTP_PORT": str(target.http_port),
        "HTTPS_PORT": str(target.https_port),
    }
    if faults := _faults(target, values):
        raise Refused(faults)
    lines = [f"{name}={value}" for name, value in values.items() if value or name in target.settings]
    return "\n".join(["# Written by make deploy, from the inventory.", *lines]) + "\n"


def quoted(name: str, value: str) -> str:
    """As Compose reads it back, blanks and signs included."""
    if PLAIN.fullmatch(value):
        return value
    if not re.search(r'["\\$`]', value):
        return f'"{value}"'
    if "'" not in value and not value.endswith("\\"):
        return f"'{value}'"
    raise Refused(
        [f"settings: {name} has both kinds of quotes, or a backslash at its end: an env file can't hold that"]
    )


def _faults(target: Target, values: dict[str, str]) -> list[str]:
    faults = [
        f"settings: {name} is {values[name]}, and e5 needs its trailing blank: leave it out, or give {meant!r}"
        for name, meant in zip(PREFIXES, ("passage: ", "query: "), strict=True)
        if "e5-" in target.settings.get("EMBED_MODEL", "e5-") and values.get(name) and not values[name].endswith(' "')
    ]
    return faults + [
        f"settings: {setting} is somebody else's service, so `secrets` has to name where its {secret} is"
        for setting, secret in FOREIGN.items()
        if target.settings.get(setting) and secret not in target.secrets
    ]


def must_be_given(target: Target) -> list[str]:
    """Secrets that the VM can't make."""
    foreign = [secret for setting, secret in FOREIGN.items() if target.settings.get(setting)]
    return [*foreign, *([] if target.postgres else ["DATABASE_URL"])]
