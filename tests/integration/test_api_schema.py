"""Requests made from the OpenAPI document, at random, against the running service: it keeps to what it says."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from fakes.provider import FakeProvider
from fakes.web import listening
from integration.conftest import TestServer
from integration.service import DIM, fresh_database, settings_for
from warmstart.runtime import open_runtime
from warmstart.web.decode import NDJSON_TYPE
from warmstart.web.openapi import document

schema = schemathesis.openapi.from_dict(json.loads(document()))


@schemathesis.serializer(NDJSON_TYPE)
def lines(_context: Any, value: Any) -> bytes:
    """Text as it is; anything else as the one line that it would be."""
    return value.encode("utf-8", "replace") if isinstance(value, str) else json.dumps(value).encode()


class Served:
    """What `listening` opens: the real runtime, with one tenant."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.key = ""

    @asynccontextmanager
    async def open(self) -> Any:
        async with open_runtime(self.values) as runtime:
            tenant = await runtime.bookkeeping.create_tenant("schema")
            self.key = await runtime.bookkeeping.create_key(tenant, "schema", unlimited=True)
            yield runtime


@pytest.fixture(scope="module")
def served(postgres_session: TestServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    home: Path = tmp_path_factory.mktemp("home")
    dsn = asyncio.run(fresh_database(postgres_session.dsn))
    with FakeProvider(DIM) as provider:
        runtime = Served(settings_for(home, dsn, provider))
        with listening(runtime) as url:  # type: ignore[arg-type]
            yield url, runtime.key


@schema.parametrize()
@settings(
    max_examples=6,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_it_keeps_to_its_document(case: Any, served: tuple[str, str]) -> None:
    url, key = served
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        response = case.call(base_url=url, headers={"Authorization": f"Bearer {key}"})
        case.validate_response(
            response,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_headers_conformance,
                response_schema_conformance,
            ],
        )
