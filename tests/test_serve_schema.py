"""Requests made from the server's own OpenAPI document, valid and invalid: no 5xx, and answers as documented."""

import collections
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from serving import KEY, Running, running, tiny_engine

N_CASES = 460
"""Right requests to each operation, and wrong ones; those without fields have few."""


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engines = {"base": tiny_engine(n_slots=32, context=48), "talk": tiny_engine(chat=True, n_slots=32, context=48)}
    with running(engines) as one:
        yield one


@pytest.mark.schemathesis
@pytest.mark.timeout(3600)
def test_five_thousand_requests_made_from_the_schema(server: Running) -> None:
    import schemathesis  # takes a second
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    with server.http() as http:
        schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
    counts: collections.Counter[int] = collections.Counter()
    for operation in schema.get_all_operations():
        for mode in GenerationMode.POSITIVE, GenerationMode.NEGATIVE:
            try_operation(operation.ok(), mode, server, counts, checks)
    print(f"{counts.total()} requests: {dict(sorted(counts.items()))}")
    assert counts.total() >= 5000 and counts[200] > 500 and counts[400] > 500
    assert server.service.in_flight == 0
    assert all(model.engine.statistics().slots_used == 0 for model in server.service.models)


def try_operation(operation: Any, mode: Any, server: Running, counts: Any, checks: list[Any]) -> None:
    """Call one operation many times; most requests name an existing model, so that more of each request is checked."""

    @settings(max_examples=N_CASES, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode), st.sampled_from(["base", "talk", "talk", None]))
    def one(case: Any, model: str | None) -> None:
        if model is not None and isinstance(case.body, dict):
            case.body["model"] = model
        response = case.call(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=300)
        counts[response.status_code] += 1
        case.validate_response(response, checks=checks)

    with suppress(Unsatisfiable):  # a request without fields has no wrong ones
        one()
