"""The load against the API: what is counted, and what a server that refuses or fails leads to."""

import asyncio

import pytest

from potluck.bench.api import ApiBenchSettings, ApiReport, bench_api
from potluck.core.errors import BenchmarkFailed
from potluck.gateway.admission import AdmissionSettings
from potluck.gateway.responding import ServiceSettings
from potluck.gateway.server import GatewayServer, GatewaySettings
from potluck.testing.memory_answering import MemoryAnswering


def measured(limits: AdmissionSettings, **changes: object) -> ApiReport:
    async def measure() -> ApiReport:
        settings = GatewaySettings(address="127.0.0.1:0", service=ServiceSettings(admission=limits))
        server = GatewayServer(MemoryAnswering("x" * 100), settings)
        await server.start()
        try:
            return await bench_api(ApiBenchSettings(url=server.url, **changes), lambda _: None)
        finally:
            await server.stop()

    return asyncio.run(measure())


def test_every_answer_is_counted_with_its_tokens() -> None:
    report = measured(AdmissionSettings(), clients=(1, 3), tokens=10, requests_per_client=2)
    assert (report.model, [load.clients for load in report.loads]) == ("memory", [1, 3])
    assert [(load.answers, load.refused) for load in report.loads] == [(2, 0), (6, 0)]
    assert all(load.tokens_per_s > 0 and load.first_token_p50_ms > 0 for load in report.loads)


def test_refusals_are_counted_and_not_hidden() -> None:
    limits = AdmissionSettings(max_concurrent_requests=1, max_waiting=0)
    [load] = measured(limits, clients=(4,), tokens=50, requests_per_client=1).loads
    assert load.refused >= 1
    assert load.answers + load.refused == 4


def test_what_cannot_be_measured_is_one_line_and_not_a_traceback() -> None:
    with pytest.raises(BenchmarkFailed, match="model_not_found"):
        measured(AdmissionSettings(), model="no-such-model", clients=(1,))
