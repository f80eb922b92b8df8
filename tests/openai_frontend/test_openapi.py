"""Requests made up from our own OpenAPI schema: no failures inside, and answers as the schema says."""

from __future__ import annotations

import collections
import contextlib

import hypothesis
import pytest
import schemathesis
from schemathesis import checks
from schemathesis.generation import GenerationMode

from openai_frontend.engine import Delta
from tests.openai_frontend.conftest import MODEL
from tests.openai_frontend.fakes import END, START, FakeEngine

CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
)
HOW = hypothesis.settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)


@pytest.mark.slow
@pytest.mark.timeout(900)  # hypothesis is slow on a loaded machine
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_answers_are_as_the_schema_says(make_app, mode: GenerationMode) -> None:
    app = make_app(FakeEngine(START, Delta(text="Hello"), Delta(audio=bytes(8)), END))
    api = schemathesis.openapi.from_asgi("/openapi.json", app)
    operations = [operation.ok() for operation in api.get_all_operations()]
    assert "/v1/chat/completions" in {operation.path for operation in operations}
    statuses = collections.defaultdict(set)
    for operation in operations:

        @HOW
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: schemathesis.Case) -> None:
            if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and "model" in case.body:
                case.body["model"] = MODEL  # or hardly any request gets beyond its name
            response = case.call_and_validate(checks=CHECKS)
            statuses[case.operation.path].add(response.status_code)

        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing about GET /version can be wrong
            ask()
    if mode is GenerationMode.POSITIVE:
        assert 200 in statuses["/v1/chat/completions"]
    else:
        assert 200 not in statuses["/v1/chat/completions"]


def test_every_operation_tells_its_errors(make_app) -> None:
    described = make_app(FakeEngine()).openapi()
    for path, operations in described["paths"].items():
        for operation in operations.values():
            assert operation["responses"]["4XX"]["content"]["application/json"]["schema"]["$ref"].endswith("/Error"), (
                path
            )
            assert "422" not in operation["responses"]
    assert {"Error", "ChatCompletion", "ChatCompletionRequest"} <= set(described["components"]["schemas"])
