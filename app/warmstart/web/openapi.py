"""The OpenAPI 3.1 document, from the table of operations and the models they use."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from warmstart import __version__
from warmstart.errors import (
    PROBLEM_BASE,
    PROBLEMS,
    AuthUnavailable,
    Forbidden,
    Overloaded,
    Problem,
    RateLimited,
    Stale,
    TenantAssertion,
    Unauthorized,
)
from warmstart.web.api import INPUT_PROBLEMS, OPERATIONS, PATH_PARAMETERS, Operation
from warmstart.web.decode import JSON_TYPE
from warmstart.web.problems import MEDIA_TYPE, ProblemDetails

#: NDJSON; docs/export.schema.json says what is on a line.
LINES: Final = {"type": "string"}
REF: Final = "#/components/schemas/{model}"
#: What any operation that needs a key may answer.
COMMON_PROBLEMS: Final = (Unauthorized, Forbidden, RateLimited, TenantAssertion, AuthUnavailable, Overloaded)
PROBLEM_HEADERS: Final = {401: "WWW-Authenticate", 405: "Allow", 429: "Retry-After", 503: "Retry-After"}

Json = dict[str, Any]


@cache
def document() -> bytes:
    """The whole document, as JSON."""
    requests = {m for o in OPERATIONS for m in (o.body, o.query) if m}
    answers = {o.answer for o in OPERATIONS if o.answer} | {ProblemDetails}
    refs, definitions = models_json_schema(
        [(m, "validation") for m in _sorted(requests)] + [(m, "serialization") for m in _sorted(answers)],
        ref_template=REF,
    )
    schemas: Json = definitions["$defs"]
    # query models are spelt out as parameters
    parameters = {m: schemas.pop(_name(refs[m, "validation"]["$ref"])) for m in _sorted({o.query for o in OPERATIONS})}
    paths: dict[str, Json] = defaultdict(dict)
    for operation in OPERATIONS:
        paths[operation.path][operation.method.lower()] = _operation(operation, parameters[operation.query])
    return json.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Warmstart",
                "version": __version__,
                "summary": "One long-term memory for coding agents.",
                "description": _problem_table(),
            },
            "servers": [{"url": "/"}],
            "security": [{"apiKey": []}],
            "paths": paths,
            "components": {
                "securitySchemes": {
                    "apiKey": {"type": "http", "scheme": "bearer", "description": "An API key, ws_sk_…"}
                },
                "schemas": schemas,
                "responses": {p.type: _problem_response([p]) for p in PROBLEMS.values()},
            },
        },
        ensure_ascii=False,
    ).encode()


def _sorted(models: Iterable[type[BaseModel]]) -> list[type[BaseModel]]:
    return sorted(models, key=lambda m: m.__name__)


def _name(ref: str) -> str:
    return ref.rsplit("/", 1)[1]


def _operation(operation: Operation, query: Json) -> Json:
    described: Json = {
        "operationId": operation.handler.__name__,
        "summary": operation.summary,
        "parameters": _parameters(operation, query),
        "responses": _responses(operation),
    }
    if operation.body:
        content = {kind: {"schema": _ref(operation.body) if kind == JSON_TYPE else LINES} for kind in operation.takes}
        described["requestBody"] = {
            "required": True,
            "description": f"At most {operation.max_body} bytes.",
            "content": content,
        }
    if not operation.authenticated:
        described["security"] = []
    return described


def _parameters(operation: Operation, query: Json) -> list[Json]:
    found: list[Json] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "pattern": PATH_PARAMETERS[name][0]},
        }
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    for name, schema in query.get("properties", {}).items():
        parameter = {"name": name, "in": "query", "required": name in query.get("required", [])}
        found.append({**parameter, "schema": _without_null(schema), "description": schema.get("description", "")})
    if Stale in operation.problems:
        found.append(
            {
                "name": "If-Match",
                "in": "header",
                "description": "The ETag of the memory as it was read, or `*`; 412 where it changed since.",
                "schema": {"type": "string"},
            }
        )
    return found


def _without_null(schema: Json) -> Json:
    """A parameter is left out where JSON would say null."""
    kept = {k: v for k, v in schema.items() if k not in ("anyOf", "description", "title")}
    if kept.get("default", ...) is None:
        del kept["default"]
    branches = [b for b in schema.get("anyOf", []) if b != {"type": "null"}]
    if len(branches) == 1:
        return {**kept, **branches[0]}
    return {**kept, "anyOf": branches} if branches else kept


def _responses(operation: Operation) -> Json:
    responses: Json = {}
    for status, text in {operation.status: operation.summary, **operation.also}.items():
        described: Json = {"description": text, "headers": _headers(operation, status)}
        if operation.answer:
            described["content"] = {
                kind: {"schema": _ref(operation.answer) if kind == JSON_TYPE else LINES} for kind in operation.gives
            }
        responses[str(status)] = described
    by_status: dict[int, list[type[Problem]]] = defaultdict(list)
    for problem in _problems(operation):
        by_status[problem.status].append(problem)
    for code in sorted(by_status):
        responses[str(code)] = _problem_response(by_status[code])
    return responses


def _problems(operation: Operation) -> list[type[Problem]]:
    if not operation.authenticated:
        return [*INPUT_PROBLEMS, Forbidden]
    return [*INPUT_PROBLEMS, *operation.body_problems, *operation.problems, *COMMON_PROBLEMS]


def _headers(operation: Operation, status: int) -> Json:
    names = []
    if operation.authenticated:
        names += ["RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"]
    if operation.etag:
        names.append("ETag")
    if status == 201:
        names.append("Location")
    return {name: {"schema": {"type": "integer" if "RateLimit" in name else "string"}} for name in names}


def _problem_response(problems: Sequence[type[Problem]]) -> Json:
    """All problems that share one status."""
    status = problems[0].status
    types = [PROBLEM_BASE + p.type for p in problems]
    narrowed = {"properties": {"type": {"enum": types}, "status": {"const": status}}}
    described: Json = {
        "description": "; ".join(f"{p.title} (`{p.type}`)" for p in problems),
        "content": {MEDIA_TYPE: {"schema": {"allOf": [_ref(ProblemDetails), narrowed]}}},
    }
    if name := PROBLEM_HEADERS.get(status):
        described["headers"] = {name: {"required": True, "schema": {"type": "string"}}}
    return described


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": REF.format(model=model.__name__)}


def _problem_table() -> str:
    rows = [f"| {p.status} | `{PROBLEM_BASE}{p.type}` | {p.title} |" for p in PROBLEMS.values()]
    head = "Errors are RFC 9457 problem details with a stable `type`:\n\n| status | type | title |\n|---|---|---|\n"
    return head + "\n".join(sorted(rows))
