"""Pages from templates: what escapes by itself, what all pages show, and how times and numbers read."""

from __future__ import annotations

import hashlib
import unicodedata
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from warmstart import __version__
from warmstart.memory import MEMORY_TYPES
from warmstart.web.dashboard.markdown import plain

if TYPE_CHECKING:
    from warmstart.web.dashboard.view import Visit

HERE: Final = Path(__file__).parent
STATIC: Final = HERE / "static"
#: All that a page needs is a file of this server; nothing in a memory can load or run anything.
PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    # `no-referrer` would make browsers send the origin "null" with every form
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
NAV: Final = (
    ("/", "Memories"),
    ("/namespaces", "Namespaces"),
    ("/trash", "Trash"),
    ("/activity", "Activity"),
    ("/health", "Health"),
    ("/keys", "API keys"),
    ("/transfer", "Export & import"),
)
#: In words, what a reason of `degraded` means for the visitor.
REASONS: Final = {
    "embedding": "the embedding service does not answer, so search goes by words alone and new memories wait for "
    "their vector",
    "postgres": "Postgres does not answer, so known keys go on working, and keys can't be listed or made",
    "redis": "the cache does not answer, which costs some speed",
    "space": "the vectors are of another model than the configured one, so search goes by words alone",
    "migrating": "a migration is running: memories may be missing until it ends, and nothing can be changed",
    "budget": "a part of the search ran out of time",
    "text": "full-text search failed, so search goes by meaning alone",
    "vector": "search by meaning failed, so search goes by words alone",
    "scan": "the scan of the newest memories failed",
    "min_score": "the least score could not be applied",
}


def page(visit: Visit, template: str, status: int = 200, **values: Any) -> Response:
    reasons, mode = visit.runtime.rung()
    html = (
        _environment()
        .get_template(template)
        .render(
            visit=visit,
            here=visit.request.url.path,
            degraded=[REASONS.get(reason, reason) for reason in reasons],
            rung=mode,
            now=datetime.now(UTC),
            **values,
        )
    )
    return HTMLResponse(html, status)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.globals.update(
        static=static, nav=NAV, types=MEMORY_TYPES, version=__version__, reasons=REASONS, timedelta=timedelta
    )
    environment.filters.update(
        ago=ago,
        utc=utc,
        iso=iso,
        number=number,
        plural=plural,
        visible=visible,
        left=left,
        ms=ms,
        hour=hour,
        plain=plain,
    )
    return environment


@cache
def static(name: str) -> str:
    """The address of a file under static/, which changes with its content, so that it may be kept for ever."""
    digest = hashlib.sha256((STATIC / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"


def number(value: int) -> str:
    return f"{value:,}"


def plural(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def ms(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def hour(start: int) -> str:
    return f"{datetime.fromtimestamp(start, UTC):%Y-%m-%d %H:%M}"


def iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def utc(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def ago(at: datetime, now: datetime) -> str:
    """How long ago, to one unit; a date where it is long."""
    seconds = (now - at).total_seconds()
    if seconds < 0:
        return f"{at.astimezone(UTC):%Y-%m-%d}"
    for limit, size, unit in ((60, 1, ""), (3600, 60, "min"), (86_400, 3600, "h"), (7 * 86_400, 86_400, "day")):
        if seconds < limit:
            count = int(seconds // size)
            if not unit:
                return "just now"
            return f"{count} {unit}{'s' if unit == 'day' and count != 1 else ''} ago"
    return f"{at.astimezone(UTC):%-d %b %Y}"


def left(until: datetime, now: datetime) -> str:
    """How much of a time in the trash is left; days are counted up, as people do."""
    seconds = (until - now).total_seconds()
    if seconds <= 0:
        return "about to be removed"
    if seconds < 86_400:
        return f"{max(1, round(seconds / 3600))} h left"
    return f"{plural(-int(-seconds // 86_400), 'day')} left"


def visible(text: str) -> str:
    """`text`, or words in its stead where nothing in it can be seen, pointed at, or read out."""
    return text if any(_is_seen(c) for c in text) else "(no visible title)"


#: Letters by their category, and yet blank.
_BLANK: Final = frozenset("\u115f\u1160\u2800\u3164\uffa0")


def _is_seen(character: str) -> bool:
    return unicodedata.category(character)[0] not in "CZM" and character not in _BLANK
