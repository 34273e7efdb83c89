"""Requests made from the API's own description, by Schemathesis: no fault of ours, no hang, every error in our form."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from potluck.gateway.error_table import TABLE
from potluck.testing.memory_answering import MemoryAnswering
from tests.support.api import app_of

_EXAMPLES = 200 if os.environ.get("POTLUCK_LONG") else 12
app = app_of(MemoryAnswering(lambda request: "x" * min(request.max_tokens, 8)))
schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"Host": "localhost"})


@schema.parametrize()
@settings(max_examples=_EXAMPLES, deadline=5000, suppress_health_check=list(HealthCheck), derandomize=True)
def test_whatever_fits_the_description_gets_an_answer_or_a_known_error(case: schemathesis.Case) -> None:
    response = case.call(headers={"Host": "localhost"})
    assert response.status_code < 500, response.text
    if response.status_code >= 400 and case.path.startswith("/v1") and "messages" not in case.path:
        assert response.json()["error"]["code"] in TABLE


def test_the_description_names_every_generating_address() -> None:
    paths = set(app._app.openapi()["paths"])
    assert paths >= {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat"}


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
