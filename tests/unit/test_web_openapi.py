"""The document against the table, its own specification, and the running application."""

from __future__ import annotations

import json
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CHECKS as CHECK_REGISTRY
from schemathesis.checks import load_all_checks

from fakes.memory_api import KEY, FakeRuntime
from fakes.web import bearer, listening
from warmstart.errors import PROBLEM_BASE, PROBLEMS
from warmstart.web.api import OPERATIONS
from warmstart.web.openapi import document

#: Rows of the contract's table that this surface serves.
TABLE = {
    ("POST", "/v1/memories"), ("POST", "/v1/memories/batch"), ("GET", "/v1/memories"),
    ("GET", "/v1/memories/counts"), ("GET", "/v1/memories/{id}"), ("PATCH", "/v1/memories/{id}"),
    ("DELETE", "/v1/memories/{id}"), ("POST", "/v1/memories/{id}/restore"), ("POST", "/v1/search"),
    ("GET", "/v1/recall"), ("POST", "/v1/context"), ("POST", "/v1/events"), ("GET", "/v1/namespaces"),
    ("PATCH", "/v1/namespaces/{name}"), ("DELETE", "/v1/namespaces/{name}"), ("GET", "/v1/health"),
    ("GET", "/healthz"), ("GET", "/readyz"),
    ("GET", "/v1/export"), ("POST", "/v1/import"),
    ("GET", "/v1/memories/{id}/history"), ("POST", "/v1/memories/{id}/history/{version}/restore"),
}  # fmt: skip


@pytest.fixture(scope="module")
def doc() -> dict[str, Any]:
    return json.loads(document())


def test_it_is_valid(doc: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(doc).validate()


def test_every_operation_is_there_and_no_other(doc: dict[str, Any]) -> None:
    documented = {(method.upper(), path) for path, item in doc["paths"].items() for method in item}
    assert documented == {(o.method, o.path) for o in OPERATIONS} == TABLE
    ids = [o["operationId"] for item in doc["paths"].values() for o in item.values()]
    assert len(ids) == len(set(ids))


def test_every_reference_leads_somewhere(doc: dict[str, Any]) -> None:
    def references(node: Any) -> Any:
        if isinstance(node, dict):
            yield from [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                yield from references(child)

    for reference in set(references(doc)):
        target: Any = doc
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]


def test_every_problem_is_documented(doc: dict[str, Any]) -> None:
    assert set(doc["components"]["responses"]) == set(PROBLEMS)
    for name in PROBLEMS:
        assert PROBLEM_BASE + name in doc["info"]["description"]
    # every one but 404 of no route and 405 is an answer of some operation
    text = json.dumps(doc["paths"])
    for name in set(PROBLEMS) - {"method-not-allowed"}:
        assert f'"{PROBLEM_BASE}{name}"' in text, name


def test_only_the_health_checks_need_no_key(doc: dict[str, Any]) -> None:
    assert doc["security"] == [{"apiKey": []}]
    free = {path for path, item in doc["paths"].items() for o in item.values() if o.get("security") == []}
    assert free == {"/healthz", "/readyz"}


def test_parameters_are_those_of_the_models(doc: dict[str, Any]) -> None:
    parameters = {p["name"]: p for p in doc["paths"]["/v1/memories"]["get"]["parameters"]}
    assert set(parameters) == {
        "namespace", "type", "tag", "source", "occurred_from", "occurred_to", "include_deleted", "only_deleted",
        "limit", "cursor",
    }  # fmt: skip
    assert parameters["limit"]["schema"]["maximum"] == 200
    assert parameters["only_deleted"]["schema"] == {"default": False, "type": "boolean"}
    assert "null" not in json.dumps(list(parameters.values()))


load_all_checks()
CHECKS = CHECK_REGISTRY.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "negative_data_rejection",
    ]
)


def has_input(operation: Any) -> bool:
    return bool(operation.body or operation.query or operation.path_parameters)


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
def test_answers_keep_to_the_document(doc: dict[str, Any], mode: Any) -> None:
    runtime = FakeRuntime()
    runtime.limiter.hit = runtime.limiter.peek  # type: ignore[method-assign] # never over the limit
    with listening(runtime) as url:
        schema = schemathesis.openapi.from_dict(doc)
        for result in schema.get_all_operations():
            operation = result.ok()
            if mode is schemathesis.GenerationMode.NEGATIVE and not has_input(operation):
                continue

            @settings(
                max_examples=3,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def answers(case: Any) -> None:
                response = case.call(base_url=url, headers=bearer(KEY))
                case.validate_response(response, checks=CHECKS)

            answers()
