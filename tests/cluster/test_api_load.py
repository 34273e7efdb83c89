"""The API over real sockets with a model without numbers: a thousand clients at once, slow ones, and ones that say nothing."""

import asyncio
import json
import os
import resource
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest

from potluck.core.errors import BadRequest
from potluck.gateway import server as server_module
from potluck.gateway.admission import AdmissionSettings
from potluck.gateway.responding import ServiceSettings
from potluck.gateway.server import GatewayServer, GatewaySettings
from potluck.net.loop import run
from potluck.testing.memory_answering import MemoryAnswering

CLIENTS = 1000
CONCURRENT = 8
WAITING = 256


@asynccontextmanager
async def served(answering: MemoryAnswering, settings: GatewaySettings) -> AsyncIterator[GatewayServer]:
    server = GatewayServer(answering, settings)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def _request(body: object) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


async def _ask(address: str, body: object) -> tuple[int, dict[str, str], bytes]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(_request(body))
        head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split(" ")[1]), headers, rest


def test_a_thousand_clients_get_200_429_or_503_and_nothing_else() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))

    async def storm() -> None:
        answering = MemoryAnswering("Everyone eats.")
        answering.model.step_s = 0.001
        limits = AdmissionSettings(
            max_concurrent_requests=CONCURRENT, max_waiting=WAITING, max_waiting_per_client=WAITING
        )
        settings = GatewaySettings(address="127.0.0.1:0", service=ServiceSettings(admission=limits))
        async with served(answering, settings) as server:
            body = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}
            await _ask(server.address, body)  # what is loaded once is loaded now
            process = psutil.Process()
            before = process.memory_info().rss
            answers = await asyncio.gather(*(_ask(server.address, body) for _ in range(CLIENTS)))
            grown = process.memory_info().rss - before
            counts = Counter(status for status, _, _ in answers)
            assert set(counts) <= {200, 429, 503}
            assert counts[200] >= WAITING
            assert counts[429] > 0
            for status, headers, rest in answers:
                if status == 200:
                    assert b"data: [DONE]" in rest
                else:
                    assert int(headers["retry-after"]) >= 1
                    assert b'"queue_full"' in rest or b'"overloaded"' in rest
            assert answering.model.most_running <= CONCURRENT
            assert answering.model.running == 0
            assert grown < 150 << 20
            status, _, _ = await _ask(server.address, body)  # and afterwards it is as before
            assert status == 200

    run(storm())


def test_a_connection_that_sends_no_headers_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HEADER_PATIENCE_S", 0.1)

    async def dawdle() -> None:
        async with served(MemoryAnswering(), GatewaySettings(address="127.0.0.1:0")) as server:
            host, _, port = server.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HT")
            assert await asyncio.wait_for(reader.read(-1), 5.0) == b""
            writer.close()

    run(dawdle())


def test_nor_does_a_second_request_that_never_ends_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_HEADER_PATIENCE_S", 0.3)

    async def dawdle() -> None:
        async with served(MemoryAnswering(), GatewaySettings(address="127.0.0.1:0")) as server:
            host, _, port = server.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"}")
            for piece in (b"GET /health", b" HTTP/1.1", b"\r\nX: y"):  # each would have set uvicorn's own clock back
                writer.write(piece)
                await asyncio.sleep(0.05)
            assert await asyncio.wait_for(reader.read(-1), 5.0) == b""
            writer.close()

    run(dawdle())


def test_there_is_no_banner_and_a_busy_server_stops_in_time() -> None:
    async def use() -> None:
        answering = MemoryAnswering()
        answering.model.prefill_s = 3600.0
        async with served(answering, GatewaySettings(address="127.0.0.1:0")) as server:
            status, headers, _ = await _ask(server.address, {"messages": []})
            assert (status, "server" in headers) == (400, False)
            waiting = asyncio.create_task(_ask(server.address, {"messages": [{"role": "user", "content": "x"}]}))
            while answering.model.running == 0:  # noqa: ASYNC110 - the model counts, and has no event
                await asyncio.sleep(0.01)
            began = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - began < 5.0
        assert answering.model.running == 0
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    run(use())


def test_an_open_address_needs_a_key_and_makes_one(tmp_path) -> None:
    async def use() -> None:
        with pytest.raises(BadRequest, match="needs a key"):
            await GatewayServer(MemoryAnswering(), GatewaySettings(address="0.0.0.0:0")).start()
        settings = GatewaySettings(address="0.0.0.0:0", key_file=tmp_path / "api-keys")
        async with served(MemoryAnswering(), settings) as server:
            assert server.new_key is not None
            assert os.stat(tmp_path / "api-keys").st_mode & 0o777 == 0o600
            _, _, port = server.address.rpartition(":")
            status, _, _ = await _ask(f"127.0.0.1:{port}", {"messages": []})
            assert status == 401

    run(use())
