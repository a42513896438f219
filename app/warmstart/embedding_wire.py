"""The OpenAI embeddings protocol: one request, and every way in which its answer can be wrong."""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx

from warmstart.errors import EmbeddingError

#: An honest answer is smaller: some 25 bytes a number, 8,192 numbers a text, 32 texts in a request.
MAX_RESPONSE_BYTES: Final = 64 * 2**20

Vector = list[float]
Result = Vector | EmbeddingError


class Throttled(EmbeddingError):
    """The provider asked for a pause."""

    def __init__(self, reason: str, hold_s: float) -> None:
        self.hold_s = hold_s
        super().__init__(reason, f"the provider asked for {hold_s:.0f} s of rest")


async def fetch(http: httpx.AsyncClient, url: str, model: str, texts: Sequence[str], width: int) -> list[Result]:
    """A vector of unit length, in half precision, for each text, or why that one is unusable.

    Raises EmbeddingError where the answer as a whole is.
    """
    # base64 is what OpenAI's own client asks for: a quarter of the bytes, and exact.
    body = {"input": list(texts), "model": model, "encoding_format": "base64"}
    # Lone surrogates, which no encoding has, become question marks.
    content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    return _vectors(_json(await _post(http, url, content)), len(texts), width)


async def _post(http: httpx.AsyncClient, url: str, content: bytes) -> bytes:
    answer = bytearray()
    try:
        async with http.stream("POST", url, content=content) as response:
            if response.status_code != 200:
                raise _refusal(response)
            async for chunk in response.aiter_raw():
                answer += chunk
                if len(answer) > MAX_RESPONSE_BYTES:
                    raise EmbeddingError("malformed", f"the answer is over {MAX_RESPONSE_BYTES} bytes")
    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
        raise EmbeddingError("reset", "the connection broke off") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EmbeddingError("unreachable", type(error).__name__) from error
    return bytes(answer)


def _refusal(response: httpx.Response) -> EmbeddingError:
    """By its status alone: the body of an error may repeat the text that was sent."""
    reason = f"status-{response.status_code}"
    hold_s = _retry_after(response.headers.get("retry-after", ""))
    if response.status_code in (429, 503) and hold_s is not None:
        return Throttled(reason, hold_s)
    return EmbeddingError(reason, "the provider refused the request")


def _retry_after(value: str) -> float | None:
    """Seconds, from either form of the header."""
    if value.isascii() and value.isdigit():
        return float(value[:9])
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise EmbeddingError("malformed", "the answer is not JSON") from None


def _vectors(answer: Any, count: int, width: int) -> list[Result]:
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
        raise EmbeddingError("malformed", "the answer has no list of vectors")
    if len(data) != count:
        raise EmbeddingError("wrong-count", f"{len(data)} vectors for {count} texts")
    by_index = {item["index"]: item.get("embedding") for item in data if type(item.get("index")) is int}
    if by_index.keys() != set(range(count)):
        raise EmbeddingError("malformed", "the vectors are not numbered")
    return [_result(by_index[index], width) for index in range(count)]


def _result(value: Any, width: int) -> Result:
    """Raises where the shape is wrong; a number that is no number may be one text's fault."""
    vector = _numbers(value)
    if len(vector) != width:
        raise EmbeddingError("wrong-width", f"a vector of {len(vector)} numbers; EMBEDDING_DIM is {width}")
    norm = math.hypot(*vector)
    if not math.isfinite(norm):
        return EmbeddingError("not-finite", "a vector with NaN or infinity", text_at_fault=True)
    if norm == 0:
        return EmbeddingError("zero-norm", "a vector without direction", text_at_fault=True)
    return _half([x / norm for x in vector])


def _numbers(value: Any) -> Vector:
    if isinstance(value, str):
        try:
            return unpack(base64.b64decode(value, validate=True))
        except (ValueError, binascii.Error, struct.error):
            raise EmbeddingError("malformed", "a vector is not base64 of float32") from None
    if not isinstance(value, list) or not all(type(x) is float or type(x) is int for x in value):
        raise EmbeddingError("malformed", "a vector is not a list of numbers")
    try:
        return [float(x) for x in value]
    except OverflowError:
        raise EmbeddingError("malformed", "a number in a vector is too large") from None


def _half(vector: Vector) -> Vector:
    """What half precision can say of it: each number within 1/2048 of itself, and half the memory where held."""
    shape = f"<{len(vector)}e"
    return list(struct.unpack(shape, struct.pack(shape, *vector)))


def pack(vector: Vector) -> bytes:
    """Little-endian float32."""
    return struct.pack(f"<{len(vector)}f", *vector)


def unpack(raw: bytes) -> Vector:
    """Raises struct.error where the length is no multiple of 4."""
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))
