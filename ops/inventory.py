"""What the operator says of the VM: an inventory file of pyinfra's form, checked whole before anything is done."""

from __future__ import annotations

import ipaddress
import os
import re
import runpy
import subprocess
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

#: A secret's value comes from one of these on the operator's machine: `env:NAME`, `file:PATH`, `command:COMMAND`.
SECRET_SOURCE: Final = re.compile(r"(env|file|command):(.+)", re.DOTALL)
#: Settings that are worked out from other fields, or are secret.
OWN_SETTINGS: Final = frozenset(
    {"DOMAIN", "ADDRESS", "MODEL_DIR", "COMPOSE_PROFILES", "WARMSTART_VERSION", "HTTP_PORT", "HTTPS_PORT"}
)
#: What may be given instead of being made on the VM, or only be given.
SECRET_NAMES: Final = frozenset(
    {
        "REDIS_PASSWORD", "UPSTASH_REDIS_REST_TOKEN", "OPENAI_API_KEY", "POSTGRES_PASSWORD", "DATABASE_URL",
        "RESTIC_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OFFSITE_SSH_KEY",
        "ALERT_WEBHOOK_TOKEN", "ALERT_SMTP_PASSWORD",
    }
)  # fmt: skip
SERVICES: Final = ("app", "caddy", "embeddings", "postgres", "redis", "prometheus", "alertmanager")
COMMAND_TIMEOUT_S: Final = 60

Port = Annotated[int, Field(ge=1, le=65535)]


class InventoryError(Exception):
    """All faults of an inventory, each with its field."""

    def __init__(self, path: Path, faults: list[str]) -> None:
        super().__init__(f"{path}:\n" + "\n".join(f"  - {fault}" for fault in faults))
        self.faults = faults


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Backup(_Strict):
    #: restic repository on the VM itself
    repository: str = "/var/backups/warmstart"
    #: a second one elsewhere: `sftp:user@host:/path` or `s3:https://host/bucket`; empty: none
    offsite: str = ""
    #: time of day of the VM, HH:MM
    at: str = Field("03:17", pattern=r"^([01]\d|2[0-3]):[0-5]\d$")
    keep_daily: int = Field(7, ge=1, le=366)
    keep_weekly: int = Field(4, ge=0, le=520)
    keep_monthly: int = Field(6, ge=0, le=240)

    @field_validator("offsite")
    @classmethod
    def _known_backend(cls, value: str) -> str:
        if value and not value.startswith(("sftp:", "s3:")):
            raise ValueError("is neither sftp:user@host:/path nor s3:https://host/bucket")
        return value


class Alerts(_Strict):
    """Where alerts go; with both empty nothing watches, and the monitoring containers don't run."""

    webhook: str = ""
    mail_to: str = ""
    mail_from: str = ""
    #: host:port
    smtp: str = ""
    smtp_user: str = ""

    @property
    def wanted(self) -> bool:
        return bool(self.webhook or self.mail_to)

    @model_validator(mode="after")
    def _mail_is_whole(self) -> Alerts:
        if self.mail_to and not (self.mail_from and self.smtp):
            raise ValueError("mail_to needs mail_from and smtp (host:port)")
        return self


class Target(_Strict):
    """One VM."""

    #: its name or address for SSH
    host: str = Field(min_length=1)
    ssh_user: str = "root"
    ssh_port: Port = 22
    ssh_key: str | None = None
    ssh_known_hosts: str | None = None
    #: a domain that points to it, or else the address that clients use
    domain: str = ""
    address: str = ""
    #: `pull`: the VM gets the pinned images itself and builds ours; `carry`: they come from this machine over SSH
    images: Literal["pull", "carry"] = "pull"
    #: for `carry`: service → an image on this machine that stands for the pinned one
    image_overrides: dict[str, str] = {}
    #: `fetch`, or a folder on this machine with the embedding model
    model: str = "fetch"
    #: settings of compose/.env.example that are no secrets
    settings: dict[str, str] = {}
    #: secret → where this machine has it: `env:NAME`, `file:PATH`, `command:COMMAND`; others are made on the VM
    secrets: dict[str, str] = {}
    #: the stack's own Postgres; without it DATABASE_URL has to be among the secrets
    postgres: bool = True
    backup: Backup = Backup()
    alerts: Alerts = Alerts()
    http_port: Port = 80
    https_port: Port = 443

    @property
    def name(self) -> str:
        """As clients reach it."""
        return self.domain or self.address

    @property
    def url(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return f"https://{name}" + ("" if self.https_port == 443 else f":{self.https_port}")

    @field_validator("domain")
    @classmethod
    def _a_domain(cls, value: str) -> str:
        if value and not re.fullmatch(r"(?=.{4,253}$)([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]*", value):
            raise ValueError(f"{value!r} is no domain such as memory.example.com: without one, give `address`")
        return value

    @field_validator("address")
    @classmethod
    def _an_address(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})", value):
            try:
                ipaddress.ip_address(value)
            except ValueError:
                raise ValueError(f"{value!r} is neither an IP address nor a host's name") from None
        return value

    @field_validator("image_overrides")
    @classmethod
    def _known_services(cls, value: dict[str, str]) -> dict[str, str]:
        return _only(value, frozenset(SERVICES), "service")

    @field_validator("secrets")
    @classmethod
    def _known_secrets(cls, value: dict[str, str]) -> dict[str, str]:
        _only(value, SECRET_NAMES, "secret")
        for name, source in value.items():
            if not SECRET_SOURCE.fullmatch(source):
                # the source isn't said again: it may be the secret itself
                raise ValueError(f"{name}: give where it comes from, not the value: env:NAME, file:PATH or command:…")
        return value

    @field_validator("settings")
    @classmethod
    def _settable(cls, value: dict[str, str]) -> dict[str, str]:
        known = example_settings()
        for name in value:
            if name in SECRET_NAMES:
                raise ValueError(f"{name} is a secret: it belongs into `secrets`, by its source")
            if name in OWN_SETTINGS:
                raise ValueError(f"{name} follows from the other fields: leave it out")
            if "\n" in value[name]:
                raise ValueError(f"{name} has a line break")
        return _only(value, known - SECRET_NAMES - OWN_SETTINGS, "setting")

    @model_validator(mode="after")
    def _consistent(self) -> Target:
        faults = []
        if bool(self.domain) == bool(self.address):
            faults.append("give either `domain`, or `address` where there is no domain")
        if not self.postgres and "DATABASE_URL" not in self.secrets:
            faults.append("postgres=False needs secrets={'DATABASE_URL': 'env:…'}: the DSN of a server such as Neon")
        if self.image_overrides and self.images != "carry":
            faults.append("image_overrides are for images='carry'")
        if self.model != "fetch" and not (Path(self.model).expanduser() / "config.json").is_file():
            faults.append(f"model: there is no config.json in {self.model}: give 'fetch' or the model's folder")
        if faults:
            raise ValueError("; ".join(faults))
        return self


def _only(value: dict[str, str], known: frozenset[str], kind: str) -> dict[str, str]:
    if unknown := sorted(set(value) - known):
        raise ValueError(f"no such {kind}: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return value


def example_settings() -> frozenset[str]:
    text = (Path(__file__).resolve().parents[1] / "compose" / ".env.example").read_text()
    return frozenset(re.findall(r"^([A-Z][A-Z0-9_]*)=", text, re.MULTILINE))


def load(path: Path) -> Target:
    """The one host of the inventory. Raises InventoryError with every fault."""
    if not path.is_file():
        raise InventoryError(path, ["there is no such file: cp ops/inventories/example.py " + str(path)])
    try:
        hosts = runpy.run_path(str(path)).get("hosts")
    except Exception as error:
        raise InventoryError(path, [f"it can't be run: {type(error).__name__}: {error}"]) from None
    if not isinstance(hosts, list) or len(hosts) != 1:
        raise InventoryError(path, ["`hosts` is a list of one host: hosts = [('203.0.113.10', {…})]"])
    host, data = hosts[0] if isinstance(hosts[0], tuple) and len(hosts[0]) == 2 else (hosts[0], {})
    if not isinstance(host, str) or not isinstance(data, dict):
        raise InventoryError(path, ["a host is a pair of its name and a dict of its fields: ('203.0.113.10', {…})"])
    try:
        return Target.model_validate({"host": host, **data})
    except ValidationError as error:
        raise InventoryError(path, [_fault(item) for item in error.errors()]) from None


def _fault(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{field}: no such field; there are {', '.join(Target.model_fields)}"
    # pydantic would add the value, which may be a secret
    message = item["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def given_secrets(target: Target) -> dict[str, str]:
    """The values that this machine has; a source that is not here is left out, since the VM may hold its value."""
    found = {}
    for name, source in target.secrets.items():
        kind, _, where = source.partition(":")
        if value := _read(kind, where):
            found[name] = value
    return found


def _read(kind: str, where: str) -> str:
    if kind == "env":
        return os.environ.get(where, "")
    if kind == "file":
        path = Path(where).expanduser()
        return path.read_text().rstrip("\n") if path.is_file() else ""
    done = subprocess.run(where, shell=True, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)  # noqa: S602 - the operator's own
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""
