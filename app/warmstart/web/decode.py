"""From the bytes of a request to a request model, or to a problem that says what is wrong."""

from __future__ import annotations

import asyncio
import json
import re
from email.message import Message
from itertools import chain
from typing import Any, Final, NoReturn, TypeVar, get_args
from urllib.parse import parse_qsl

from pydantic import BaseModel
from starlette.requests import Request

from warmstart.errors import Invalid, MalformedRequest, Problem, TooLarge, UnsupportedMedia
from warmstart.exchange import MAX_CHUNK, MAX_CHUNK_MEMORIES, Export, ExportedMemory, Header
from warmstart.memory import parse

JSON_TYPE: Final = "application/json"
NDJSON_TYPE: Final = "application/x-ndjson"
MAX_BODY: Final = 1 << 20
MAX_BATCH_BODY: Final = 8 << 20
#: Levels of JSON; far below what Python and pydantic can walk back out.
MAX_DEPTH: Final = 32
MAX_PARAMETERS: Final = 50
#: A refused body is read on to this size, so that its sender gets to read the refusal.
MAX_DRAIN: Final = 32 << 20
BODY_TIMEOUT_S: Final = 30.0

M = TypeVar("M", bound=BaseModel)

_INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_BOOLEANS: Final = {"true": True, "false": False, "True": True, "False": False}


async def read_body(request: Request, model: type[M], limit: int) -> M:
    """The JSON body as `model`. Problems: 400, 413, 415, 422."""
    body = await read_bytes(request, limit)
    _content_type(request, (JSON_TYPE,), empty=not body)
    if not body:
        raise MalformedRequest("the body is empty; send a JSON object")
    return parse(model, parse_json(body))


def read_query(query_string: bytes, model: type[M]) -> M:
    """The query parameters as `model`, strictly: `10`, `true`, ISO 8601; none unknown, none twice."""
    try:
        pairs = parse_qsl(
            query_string.decode("ascii"),
            keep_blank_values=True,
            errors="strict",
            max_num_fields=MAX_PARAMETERS,
        )
    except UnicodeDecodeError:
        raise MalformedRequest("the query string must be percent-encoded UTF-8") from None
    except ValueError:
        raise MalformedRequest(f"at most {MAX_PARAMETERS} query parameters") from None
    values: dict[str, Any] = {}
    for name, text in pairs:
        if name in values:
            fault = {"field": name, "problem": "must be given once", "fault": "value"}
            raise Invalid(f"{name}: must be given once", field=name, errors=[fault])
        values[name] = _from_text(model, name, text)
    return parse(model, values)


def parse_json(body: bytes) -> Any:
    """JSON as RFC 8259 has it: UTF-8, no NaN, no name twice, a bounded depth."""
    try:
        data = json.loads(body.decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise MalformedRequest(f"the body must be UTF-8; byte {error.start} is not") from None
    except json.JSONDecodeError as error:
        raise MalformedRequest(
            f"the body is no JSON: {error.msg} at line {error.lineno} column {error.colno}"
        ) from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        # Python's own limit on digits
        raise MalformedRequest("the body holds a number with too many digits") from None
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [c for c in chain.from_iterable(map(_children, level)) if isinstance(c, dict | list)]
        if not level:
            return data
    raise _too_deep()


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _too_deep() -> MalformedRequest:
    return MalformedRequest(f"the body is nested too deeply; at most {MAX_DEPTH} levels")


def _no_constant(name: str) -> NoReturn:
    raise MalformedRequest(f"the body is no JSON: {name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise MalformedRequest(f"the body names {name[:100]!r} twice in one object")
        values[name] = value
    return values


async def read_import(request: Request) -> list[ExportedMemory]:
    """The memories of an NDJSON or JSON body. Problems: 400, 413, 415, 422, with the line at fault."""
    body = await read_bytes(request, MAX_CHUNK)
    kind = _content_type(request, (JSON_TYPE, NDJSON_TYPE), empty=not body)
    if not body:
        raise MalformedRequest("the body is empty; send an export, whole or some lines of it")
    # of a large body other requests should not wait for
    return await asyncio.to_thread(_export_of if kind == JSON_TYPE else _lines_of, body)


def _export_of(body: bytes) -> list[ExportedMemory]:
    return _each_once(parse(Export, parse_json(body)).memories)


def _lines_of(body: bytes) -> list[ExportedMemory]:
    """Line by line; the first may be an export's header."""
    memories: list[ExportedMemory] = []
    for number, line in enumerate(body.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            data = parse_json(line)
            if not memories and isinstance(data, dict) and "schema" in data:
                parse(Header, data)
                continue
            if len(memories) >= MAX_CHUNK_MEMORIES:
                raise Invalid(f"at most {MAX_CHUNK_MEMORIES} memories a request; send the rest in others")
            memories.append(parse(ExportedMemory, data))
        except Problem as problem:
            problem.detail = f"line {number}: {problem.detail}"
            problem.extra["line"] = number
            raise
    return _each_once(memories)


def _each_once(memories: list[ExportedMemory]) -> list[ExportedMemory]:
    seen: set[str] = set()
    for memory in memories:
        if memory.id in seen:
            raise Invalid(f"id: {memory.id} is there twice", field="id")
        seen.add(memory.id)
    return memories


def _content_type(request: Request, served: tuple[str, ...], *, empty: bool) -> str | None:
    """That of the body, one of `served`."""
    given = request.headers.get("content-type")
    if given is None and empty:
        return None
    message = Message()
    message["content-type"] = given or "none/none"
    charset = message.get_param("charset", "utf-8")
    kind = message.get_content_type()
    if kind not in served or str(charset).lower() not in ("utf-8", "utf8"):
        raise UnsupportedMedia(f"the body must be JSON: send Content-Type: {' or '.join(served)}")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("the body must not be compressed: send it without Content-Encoding")
    return kind


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes of it, with or without a Content-Length."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    body += chunk
                elif size > MAX_DRAIN:
                    break
    except TimeoutError:
        raise MalformedRequest(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    if size > limit:
        raise TooLarge(f"the body is over the {limit} bytes allowed here", limit=limit)
    return bytes(body)


def _from_text(model: type[BaseModel], name: str, text: str) -> Any:
    """`text` as what the field is made of; what does not convert is left for the model to refuse."""
    field = model.model_fields.get(name)
    kinds = _leaves(field.annotation) if field else set()
    if int in kinds and _INTEGER.fullmatch(text):
        return int(text)
    if bool in kinds:
        return _BOOLEANS.get(text, text)
    return text


def _leaves(annotation: Any) -> set[Any]:
    """The classes an annotation is made of, through unions; the words of a Literal are none."""
    if args := get_args(annotation):
        return set().union(*map(_leaves, args))
    return {annotation} if isinstance(annotation, type) else set()
