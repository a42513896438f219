"""Problems as HTTP answers (RFC 9457)."""

from __future__ import annotations

import json
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from warmstart.errors import MethodNotAllowed, NotFound, Problem

MEDIA_TYPE: Final = "application/problem+json"
#: Seconds, where the problem itself names none.
DEFAULT_RETRY_AFTER: Final = 1
#: An answer never echoes more than this of a request's own text, nor more faults.
MAX_ECHO: Final = 500
MAX_FAULTS: Final = 20
#: Where in the scope a page leaves how its problems are shown.
PROBLEM_RESPONSE: Final = "warmstart.problem_response"


class Fault(BaseModel):
    """One broken rule."""

    field: str = Field(description="Path of the field, dotted; empty for the body as a whole.")
    problem: str
    fault: str = Field(description="missing, extra_forbidden, type or value")
    limit: Any = Field(None, description="What is allowed.")
    size: int | None = Field(None, description="How large the given value is.")


class ProblemDetails(BaseModel):
    """RFC 9457 problem details."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="Stable; the last part of the path names the problem.")
    title: str
    status: int
    detail: str = Field(description="What was wrong, what is allowed, what to do.")
    field: str | None = Field(None, description="The field at fault.")
    errors: list[Fault] | None = Field(None, description="Every fault, where there are several.")
    retry_after: int | None = Field(None, description="Seconds; also in the Retry-After header.")


def problem_response(problem: Problem) -> Response:
    # json.dumps escapes lone surrogates, which a refused field name may hold
    content = json.dumps(_bounded(problem.to_dict()), default=str).encode()
    return Response(content, problem.status, headers_of(problem), MEDIA_TYPE)


def headers_of(problem: Problem) -> dict[str, str]:
    headers: dict[str, str] = {}
    if problem.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="warmstart"'
    elif problem.status == 405:
        headers["Allow"] = ", ".join(problem.extra.get("allow", []))
    elif problem.status in (429, 503):
        headers["Retry-After"] = str(problem.extra.get("retry_after", DEFAULT_RETRY_AFTER))
    return headers


def _bounded(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= MAX_ECHO else value[:MAX_ECHO] + "…"
    if isinstance(value, dict):
        return {k: _bounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_bounded(v) for v in value[:MAX_FAULTS]]
    return value


async def http_exception(request: Request, error: Exception) -> Response:
    """What Starlette's router raises on its own: no route."""
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this class alone
    return problem_response(
        NotFound("there is nothing at this path; /openapi.json lists what is served")
        if error.status_code == 404
        else Problem(error.detail)
    )


def method_not_allowed(method: str, allowed: list[str]) -> MethodNotAllowed:
    return MethodNotAllowed(f"{method[:20]} is not served here; use {', '.join(allowed)}", allow=allowed)
