"""One stream, no secrets, no flood."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog

from warmstart import logs
from warmstart.logs import BLANK, MAX_EVENTS, MAX_VALUE, REPEATS_PER_MINUTE, RepeatLimiter, configure

KEY = "ws_sk_" + "k" * 43


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_structlog_and_the_standard_library_are_one_json_stream(stream: io.StringIO) -> None:
    configure("info", stream=stream)
    structlog.get_logger("warmstart.x").warning("search.degraded", reason="timeout", took=1.5)
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 7)
    logging.getLogger("uvicorn.access").info("GET /")
    logging.getLogger("lib").error("bad", extra={"colour": "red"})
    first, second, third, fourth = lines(stream)
    assert first["event"] == "search.degraded"
    assert (first["level"], first["logger"], first["reason"]) == ("warning", "warmstart.x", "timeout")
    assert first["timestamp"].endswith("Z")
    assert (second["event"], second["level"], second["logger"]) == (
        "Started server process [7]",
        "info",
        "uvicorn.error",
    )
    assert third["event"] == "GET /"
    assert fourth["colour"] == "red"


def test_bound_context_is_in_each_line(stream: io.StringIO) -> None:
    configure("info", stream=stream)
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger().info("a")
        logging.getLogger("lib").warning("b")
    assert [line["request_id"] for line in lines(stream)] == ["r1", "r1"]


def test_levels(stream: io.StringIO) -> None:
    configure("warning", stream=stream)
    structlog.get_logger().info("no")
    structlog.get_logger().warning("yes")
    configure("info", stream=stream)
    logging.getLogger("httpx").info("HTTP Request: one line for each")
    assert [line["event"] for line in lines(stream)] == ["yes"]
    configure("debug", stream=stream)
    logging.getLogger("httpx").info("asked for")
    structlog.get_logger().debug("detail")
    assert [line["event"] for line in lines(stream)] == ["yes", "asked for", "detail"]


def test_configuring_twice_does_not_write_twice(stream: io.StringIO) -> None:
    configure("info", stream=stream)
    configure("info", stream=stream)
    structlog.get_logger().info("once")
    assert len(lines(stream)) == 1


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_tracebacks_have_no_locals(stream: io.StringIO, log_format: str) -> None:
    configure("info", log_format, stream=stream)

    def fail(argument: str) -> None:
        hidden = argument + "-secret-local"
        raise ValueError(f"broken {len(hidden)}")

    for log in (structlog.get_logger().exception, logging.getLogger("lib").exception):
        try:
            fail("private")
        except ValueError:
            log("it broke")
    text = stream.getvalue()
    assert text.count("broken 20") >= 2
    assert "fail" in text
    assert "private-secret-local" not in text
    assert '"locals"' not in text


SECRETS = {
    "a key": f"login with {KEY} failed",
    "a bearer": "header Authorization: Bearer abcdefgh12345",
    "a DSN": "connect to postgresql://user:hunter22@db:5432/x failed",
    "a known value": "the token is correct horse battery",
}


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_secrets_are_blanked_wherever_they_come(stream: io.StringIO, text: str, log_format: str) -> None:
    configure("info", log_format, stream=stream, secrets=["correct horse battery", "", "db"])
    log = structlog.get_logger()
    log.info(text)
    log.info("in a field", detail=text, deep={"list": [text]})
    logging.getLogger("lib").warning("in an argument: %s", text)
    try:
        raise RuntimeError(text)
    except RuntimeError:
        log.exception("in an exception")
    written = stream.getvalue()
    for secret in (KEY, "k" * 43, "abcdefgh12345", "hunter22", "correct horse"):
        assert secret not in written
    assert written.count(BLANK) >= 4


@pytest.mark.parametrize(
    "name", ["authorization", "api_key", "openai_api_key", "password", "token", "database_url", "Cookie"]
)
def test_fields_named_like_secrets_are_blanked(stream: io.StringIO, name: str) -> None:
    configure("info", stream=stream)
    structlog.get_logger().info("a", **{name: "zzz"})
    logging.getLogger("lib").warning("b", extra={name: "zzz"})
    assert [line[name] for line in lines(stream)] == [BLANK, BLANK]


def test_figures_about_tokens_are_no_secret(stream: io.StringIO) -> None:
    configure("info", stream=stream)
    structlog.get_logger().info("a", key_id="key_1", tokens=7, token_budget=3)
    (line,) = lines(stream)
    assert (line["key_id"], line["tokens"], line["token_budget"]) == ("key_1", 7, 3)


def test_a_line_is_bounded_and_always_json(stream: io.StringIO) -> None:
    configure("info", stream=stream)
    structlog.get_logger().info("long", text="x" * (MAX_VALUE + 1), odd=object(), lone="\ud800", at="x" * MAX_VALUE)
    (line,) = lines(stream)
    assert line["text"] == "x" * MAX_VALUE + f"… ({MAX_VALUE + 1} characters)"
    assert line["at"] == "x" * MAX_VALUE
    assert "\n" not in stream.getvalue()[:-1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_auto_is_a_console_on_a_terminal_only(stream: io.StringIO) -> None:
    terminal = Terminal()
    configure("info", "auto", stream=terminal)
    structlog.get_logger().info("hello", colour="red")
    assert "\x1b[" in terminal.getvalue()
    configure("info", "json", stream=(forced := Terminal()))
    structlog.get_logger().info("hello")
    assert lines(forced)[0]["event"] == "hello"


def test_an_error_loop_writes_so_many_lines_and_one_sum(stream: io.StringIO) -> None:
    configure("info", stream=stream)
    log = structlog.get_logger("worker")
    for n in range(2_000):
        log.error("embedding.failed", attempt=n)
    log.info("something else")
    written = lines(stream)
    assert [line["event"] for line in written].count("embedding.failed") == REPEATS_PER_MINUTE
    assert written[-1]["event"] == "something else"
    (limiter,) = logging.getLogger().handlers[-1].filters
    assert isinstance(limiter, RepeatLimiter)
    limiter.flush()
    last = lines(stream)[-1]
    assert last["event"] == f"{2_000 - REPEATS_PER_MINUTE} more lines like this were not written: embedding.failed"
    assert (last["level"], last["logger"]) == ("error", "worker")


def record(text: str, level: int = logging.ERROR, name: str = "x") -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, text, (), None)


class Limited:
    """A limiter of 2 lines with a clock to turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sums: list[str] = []
        self.limiter = RepeatLimiter(lambda r: self.sums.append(r.getMessage()), 2, lambda: self.now)

    def __call__(self, *args: Any) -> bool:
        return self.limiter.filter(record(*args))


def test_one_below_at_and_one_above_the_limit() -> None:
    limited = Limited()
    assert [limited("a") for _ in range(4)] == [True, True, False, False]
    limited.now = 59.9
    assert not limited("a")
    assert limited.sums == []
    limited.now = 60.0
    assert limited("a")
    assert limited.sums == ["3 more lines like this were not written: a"]


def test_the_sum_comes_with_the_next_line_of_any_event_and_once() -> None:
    limited = Limited()
    for _ in range(3):
        limited("a")
    limited.now = 61.0
    assert limited("b")
    assert limited.sums == ["1 more lines like this were not written: a"]
    limited.limiter.flush()
    assert len(limited.sums) == 1


def test_events_are_told_apart_by_logger_level_and_text_but_not_by_figures() -> None:
    limited = Limited()
    assert [limited(f"retry {n} in 0.{n} s of 3f2a9c7e{n:04x}") for n in range(4)] == [True, True, False, False]
    assert limited("retry 1 in 0.1 s of 3f2a9c7e0000", logging.WARNING)
    assert limited("retry 1 in 0.1 s of 3f2a9c7e0000", logging.ERROR, "y")
    assert limited("retried 1 in 0.1 s")


def test_as_many_events_are_kept_as_the_limit_says() -> None:
    limited = Limited()
    words = [chr(ord("g") + n % 20) * (n // 20 + 1) for n in range(MAX_EVENTS)]
    for _ in range(3):
        limited("first!")
    for word in words:
        limited(word + "!")
    assert len(limited.limiter._events) == MAX_EVENTS
    assert limited.sums == ["1 more lines like this were not written: first!"]


def test_a_client_logs_to_files_and_warns_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "CLIENT_LOG_BYTES", 2_000)
    logs.configure_client("info", "mcp", tmp_path / "logs", secrets=["correct horse battery"])
    log = structlog.get_logger()
    log.error("correct horse battery")
    for n in range(50):
        log.info("x" * n)
    log.warning("look at this")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 2
    assert "look at this" in captured.err
    assert "correct horse" not in captured.err
    files = sorted(p.name for p in (tmp_path / "logs").iterdir())
    assert files == ["mcp.log", "mcp.log.1", "mcp.log.2", "mcp.log.3"]
    assert all(p.stat().st_size <= 2_000 for p in (tmp_path / "logs").iterdir())
    for handler in logging.getLogger().handlers:
        if getattr(handler, "warmstart", False):
            handler.close()


def test_a_home_that_cannot_be_written_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    logs.configure_client("info", "mcp", tmp_path / "file" / "logs")
    structlog.get_logger().warning("still heard")
    assert "still heard" in capsys.readouterr().err


def test_what_was_held_back_is_summed_up_at_exit() -> None:
    code = (
        "from warmstart.logs import configure; import structlog; configure('info', 'json')\n"
        f"for _ in range({REPEATS_PER_MINUTE + 5}): structlog.get_logger().error('loop')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    written = done.stderr.splitlines()
    assert len(written) == REPEATS_PER_MINUTE + 1
    assert "5 more lines" in written[-1]
    assert done.stdout == ""
