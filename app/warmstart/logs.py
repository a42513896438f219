"""Logging: structlog over the standard library, so that uvicorn's lines are in the same stream.

JSON lines, or a console on a terminal; tracebacks without locals; secrets
blanked in whatever reaches a line. A line that repeats is counted instead of
written, since an error loop can fill a disk.
"""

from __future__ import annotations

import atexit
import logging
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Final, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

#: Lines of one event a minute; the rest is counted.
REPEATS_PER_MINUTE: Final = 60
WINDOW_S: Final = 60.0
#: Events told apart at once; the oldest is summed up and forgotten.
MAX_EVENTS: Final = 1_000
#: Characters of one value in a line.
MAX_VALUE: Final = 8_000
MAX_FRAMES: Final = 20
CLIENT_LOG_BYTES: Final = 2_000_000
CLIENT_LOG_FILES: Final = 3

BLANK: Final = "[secret]"
#: A shorter secret is no secret, and blanking it would blank words.
MIN_SECRET: Final = 8
#: Libraries that log each request at info.
CHATTY: Final = ("httpx", "httpcore", "httpx2", "httpcore2", "mcp", "asyncio")

_SECRET_NAME = re.compile(r"authorization|password|passwd|secret|token$|api_?key$|dsn|database_url|cookie", re.I)
_SECRET_VALUE = re.compile(
    r"ws_sk_[A-Za-z0-9_-]+"
    r"|(?<=bearer )[^\s\"',}]{8,}"
    r"|(?<=://)[^\s/@\"]+:[^\s/@\"]*(?=@)",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[0-9a-f]{8,}|\d+", re.IGNORECASE)


def configure(
    level: str, log_format: str = "auto", *, secrets: Sequence[str] = (), stream: TextIO | None = None
) -> None:
    """Sends every logger's lines to `stream` (stderr). `secrets`: values that must never appear."""
    stream = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    _install(level, [_handler(logging.StreamHandler(stream), secrets, console=console)])


def configure_client(level: str, name: str, directory: Path | None = None, *, secrets: Sequence[str] = ()) -> None:
    """For programs whose stdout is not theirs: rotating files, and warnings to stderr."""
    stderr = _handler(logging.StreamHandler(sys.stderr), secrets, console=sys.stderr.isatty())
    stderr.setLevel(logging.WARNING)
    handlers = [stderr]
    directory = directory or Path.home() / ".warmstart" / "logs"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = RotatingFileHandler(
            directory / f"{name}.log",
            maxBytes=CLIENT_LOG_BYTES,
            backupCount=CLIENT_LOG_FILES,
            encoding="utf-8",
        )
        handlers.append(_handler(file, secrets, console=False))
    except OSError:
        pass  # a home that can't be written is no reason not to serve
    _install(level, handlers)


def _install(level: str, handlers: list[logging.Handler]) -> None:
    root = logging.getLogger()
    for old in root.handlers[:]:
        if getattr(old, "warmstart", False):
            root.removeHandler(old)
            old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    quiet = logging.NOTSET if level == "debug" else logging.WARNING
    for name in CHATTY:
        logging.getLogger(name).setLevel(quiet)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def _shared() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        blank_secret_fields,
    ]


def _handler(handler: logging.Handler, secrets: Sequence[str], *, console: bool) -> logging.Handler:
    render: list[Processor]
    if console:
        plain = structlog.dev.plain_traceback
        render = [structlog.dev.ConsoleRenderer(colors=True, exception_formatter=plain)]
    else:
        transformer = ExceptionDictTransformer(show_locals=False, max_frames=MAX_FRAMES)
        render = [
            structlog.processors.ExceptionRenderer(transformer),
            cut_values,
            structlog.processors.JSONRenderer(ensure_ascii=True, default=_as_text),
        ]
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *_shared()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render, _Blank(secrets)],
        )
    )
    limiter = RepeatLimiter(handler.handle)
    handler.addFilter(limiter)
    atexit.register(limiter.flush)
    handler.warmstart = True  # type: ignore[attr-defined]
    return handler


def _as_text(value: Any) -> str:
    return str(value)


def blank_secret_fields(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """Blanks fields whose name says that they hold a secret."""
    for name in event:
        if _SECRET_NAME.search(name):
            event[name] = BLANK
    return event


def cut_values(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    return {name: _cut(value) for name, value in event.items()}


def _cut(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MAX_VALUE else f"{value[:MAX_VALUE]}… ({len(value)} characters)"
    if isinstance(value, dict):
        return {name: _cut(inner) for name, inner in value.items()}
    return [_cut(inner) for inner in value] if isinstance(value, list) else value


class _Blank:
    """The last step: blanks what looks like a secret, or is one, in the finished line."""

    def __init__(self, secrets: Sequence[str]) -> None:
        known = sorted({s for s in secrets if len(s) >= MIN_SECRET}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, logger: WrappedLogger, method: str, line: EventDict) -> str:
        text = _SECRET_VALUE.sub(BLANK, str(line))
        return self._known.sub(BLANK, text) if self._known else text


@dataclass
class _Repeats:
    started: float
    count: int = 0


class RepeatLimiter(logging.Filter):
    """Lets through so many lines of one event a minute, and sums up the rest in one line.

    An event is logger, level and text, figures and ids aside. The sum comes with
    the first line of any event after the minute, or at exit.
    """

    def __init__(
        self,
        emit: Callable[[logging.LogRecord], object],
        limit: int = REPEATS_PER_MINUTE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._emit, self._limit, self._clock = emit, limit, clock
        self._events: OrderedDict[tuple[str, int, str], _Repeats] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "is_summary", False):
            return True
        key = (record.name, record.levelno, _VARIABLE.sub("#", _event(record))[:200])
        now = self._clock()
        with self._lock:
            ended = self._pop_ended(now)
            repeats = self._events.setdefault(key, _Repeats(now))
            repeats.count += 1
            if len(self._events) > MAX_EVENTS:
                ended.append(self._events.popitem(last=False))
            allowed = repeats.count <= self._limit
        self._summarise(ended)
        return allowed

    def flush(self) -> None:
        with self._lock:
            ended = list(self._events.items())
            self._events.clear()
        self._summarise(ended)

    def _pop_ended(self, now: float) -> list[tuple[tuple[str, int, str], _Repeats]]:
        """Windows all last the same time, so the oldest end first."""
        ended = []
        while self._events and now - next(iter(self._events.values())).started >= WINDOW_S:
            ended.append(self._events.popitem(last=False))
        return ended

    def _summarise(self, ended: list[tuple[tuple[str, int, str], _Repeats]]) -> None:
        for (name, level, event), repeats in ended:
            if (more := repeats.count - self._limit) > 0:
                text = f"{more} more lines like this were not written: {event}"
                record = logging.LogRecord(name, level, __file__, 0, text, (), None)
                record.is_summary = True
                self._emit(record)


def _event(record: logging.LogRecord) -> str:
    """The event of a structlog record; of any other the text before its arguments are put in."""
    if isinstance(record.msg, dict):
        return str(record.msg.get("event", ""))
    return str(record.msg)
