"""Pages of other sites, rebound names, wrong keys, large and slow bodies: refused on every route and with every method."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from potluck.core.errors import BadKeyFile, BadRequest
from potluck.gateway.admission import Tier
from potluck.gateway.api_keys import load_or_create_api_keys
from potluck.gateway.app import build_app
from potluck.gateway.guarding import GuardSettings, named_host, named_origin
from potluck.gateway.responding import Service, ServiceSettings
from potluck.testing.memory_answering import MemoryAnswering
from tests.support.api import MESSAGES, app_of, get, post, with_client


@pytest.fixture(scope="module")
def app() -> Any:
    return app_of(MemoryAnswering())


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
KEY = "potluck-a-key-of-some-length"


def paths() -> list[str]:
    app = app_of(MemoryAnswering())
    shown = {getattr(route, "path", "") for route in app._app.routes}
    return sorted(
        {path.replace("{model_id:path}", "memory") for path in shown if path} | {"/", "/nowhere", "/openapi.json"}
    )


HOSTILE = {
    "another site": {"Origin": "https://evil.example"},
    "another port": {"Origin": "http://127.0.0.1:9999"},
    "a sandboxed page": {"Origin": "null"},
    "a rebound name": {"Host": "evil.example"},
    "a rebound name with its own origin": {"Host": "evil.example:7470", "Origin": "http://evil.example:7470"},
    "a name that begins like ours": {"Host": "localhost.evil.example"},
    "a name with a user": {"Host": "localhost@evil.example"},
    "an image on another site": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    "no host": {"Host": ""},
}  # fmt: skip


@pytest.mark.parametrize("attempt", HOSTILE)
def test_every_route_and_method_refuses(attempt: str) -> None:
    answering = MemoryAnswering()
    body = json.dumps({"model": "memory", "messages": MESSAGES, "prompt": "x", "max_tokens": 2, "input": "x"})

    async def try_all(client) -> list[tuple[str, str, int]]:
        tried = []
        for path in paths():
            for method in METHODS:
                response = await client.request(method, path, content=body, headers=HOSTILE[attempt])
                assert "access-control-allow-origin" not in response.headers
                tried.append((method, path, response.status_code))
        return tried

    tried = with_client(app_of(answering), try_all)
    assert len(tried) > 150
    assert {status for _, _, status in tried} == {403}
    assert answering.model.most_running == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.1:7470"}, {"Host": "localhost"}, {"Host": "[::1]:7470"}, {"Host": "192.168.0.7:7470"},
        {"Host": "LOCALHOST:1"}, {"Host": "127.0.0.1:7470", "Origin": "http://127.0.0.1:7470"},
        {"Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"},
    ],
)  # fmt: skip
def test_programs_and_our_own_page_may_ask(headers: dict[str, str]) -> None:
    assert get(app_of(MemoryAnswering()), "/v1/models", **headers).status_code == 200


def test_named_hosts_and_origins_may_ask() -> None:
    guard = GuardSettings(allowed_hosts=frozenset({"kitchen"}), allowed_origins=frozenset({"https://chat.example"}))
    app = app_of(MemoryAnswering(), guard=guard)
    response = get(app, "/v1/models", Host="kitchen:7470", Origin="https://chat.example")
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    preflight = with_client(
        app,
        lambda client: client.options(
            "/v1/models", headers={"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        ),
    )
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (204, "https://chat.example")


@pytest.mark.parametrize(
    ("typed", "host"),
    [
        ("Kitchen.Local", "kitchen.local"), ("kitchen:7470", "kitchen"), ("kitchen.local.", "kitchen.local"),
        ("[::1]:7470", "::1"), ("192.168.0.7", "192.168.0.7"),
    ],
)  # fmt: skip
def test_a_host_is_taken_as_requests_name_it(typed: str, host: str) -> None:
    assert named_host(typed) == host
    app = app_of(MemoryAnswering(), guard=GuardSettings(allowed_hosts=frozenset({named_host(typed)})))
    assert get(app, "/v1/models", Host=typed).status_code == 200


@pytest.mark.parametrize(
    "typed", ["", "*", "http://kitchen", "kitchen/page", "a@kitchen", "küche.local", "kitchen:port"]
)
def test_what_is_no_host_is_refused(typed: str) -> None:
    with pytest.raises(BadRequest, match="--allow-host takes a name like"):
        named_host(typed)


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("https://chat.example/", "https://chat.example"), ("HTTPS://Chat.Example", "https://chat.example"),
        ("https://chat.example:443", "https://chat.example"), ("http://chat.example:443", "http://chat.example:443"),
        ("http://[::1]:3000/", "http://[::1]:3000"), ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)  # fmt: skip
def test_a_site_is_taken_as_browsers_name_it(typed: str, sent: str) -> None:
    app = app_of(MemoryAnswering(), guard=GuardSettings(allowed_origins=frozenset({named_origin(typed)})))
    assert get(app, "/v1/models", Origin=sent).status_code == 200


@pytest.mark.parametrize(
    "typed",
    ["", "*", "null", "chat.example", "localhost:3000", "https://", "https://chat.example/page", "://chat.example"],
)
def test_what_is_no_site_is_refused(typed: str) -> None:
    with pytest.raises(BadRequest, match="takes a site with its scheme"):
        named_origin(typed)


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
def test_a_key_is_asked_for_everywhere_but_for_health(header: str) -> None:
    app = app_of(MemoryAnswering(), guard=GuardSettings(keys={KEY: Tier.GOLD}))
    right = KEY if header == "x-api-key" else f"Bearer {KEY}"
    assert get(app, "/v1/models", **{header: right}).status_code == 200
    for wrong in ("", KEY, "Bearer", f"Bearer {KEY}x", "Bearer " + "x" * 5000):
        value = wrong if header == "Authorization" else wrong + "!"
        response = get(app, "/v1/models", **{header: value})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
    assert get(app, "/openapi.json").status_code == 401
    assert get(app, "/health").status_code == 200


def test_there_is_no_banner() -> None:
    response = get(app_of(MemoryAnswering()), "/health")
    assert "server" not in response.headers
    assert "potluck" not in response.text.lower()


def test_a_large_body_is_refused_before_it_is_read_and_a_lying_one_when_it_grows() -> None:
    app = app_of(MemoryAnswering(), guard=GuardSettings(max_body_bytes=100))
    assert post(app, "/v1/chat/completions", b"x" * 101).status_code == 413

    async def grow(client):
        async def parts():
            for _ in range(20):
                yield b"x" * 10

        return await client.post("/v1/chat/completions", content=parts())

    assert with_client(app, grow).status_code == 413


def test_bodies_of_all_requests_together_are_bounded() -> None:
    app = app_of(MemoryAnswering(), guard=GuardSettings(max_buffered_bytes=50))
    response = post(app, "/v1/chat/completions", {"messages": MESSAGES})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert app._buffered == 0


def test_a_slow_body_is_given_up() -> None:
    app = app_of(MemoryAnswering(), guard=GuardSettings(body_patience_s=0.01))

    async def dawdle(client):
        async def parts():
            yield b"{"
            await asyncio.sleep(1.0)
            yield b"}"

        return await client.post("/v1/chat/completions", content=parts())

    response = with_client(app, dawdle)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")
    assert app._buffered == 0


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"nonsense", b"[" * 100_000, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"a":' * 20_000,
     b"\xff\xfe", b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
     b'{"messages": [{"role": "user", "content": "x"}], "seed": 1' + b"0" * 5000 + b"}",
     b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
     b'{"messages": [{"role": "user", "content": "x", "tool_calls": 3}]}',
     json.dumps({"messages": MESSAGES, "chat_template_kwargs": {"a": [[[[]]]] * 3, "b": "x" * 99}}).encode()[:-1]],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/tokenize"])
def test_rubbish_is_a_bad_request(body: bytes, path: str, app: Any) -> None:
    assert post(app, path, body).status_code == 400


def test_a_key_file_is_made_for_its_owner_alone_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "api-keys"
    keys, made = load_or_create_api_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert keys == {made: Tier.GOLD}
    assert load_or_create_api_keys(path) == (keys, None)
    path.write_text("a-key-of-enough-length silver\n# a comment\n")
    assert load_or_create_api_keys(path)[0] == {"a-key-of-enough-length": Tier.SILVER}
    path.chmod(0o644)
    with pytest.raises(BadKeyFile, match="chmod 600"):
        load_or_create_api_keys(path)


def test_a_browser_gets_the_page_without_the_key_and_nothing_else() -> None:
    """It has to have the page before it can ask for the key."""
    app = app_of(MemoryAnswering(), guard=GuardSettings(keys={KEY: Tier.GOLD}))
    assert get(app, "/").status_code == 200
    assert get(app, "/page/main.js").status_code != 401  # mounted by the node; here there is none
    assert post(app, "/", {}).status_code == 401
    assert get(app, "/potluck/state").status_code == 401


@pytest.mark.parametrize(
    ("path", "is_expected"),
    [
        ("/v1/messages", lambda body: body["type"] == "error" and body["error"]["code"] == "forbidden_origin"),
        ("/api/chat", lambda body: isinstance(body["error"], str)),
        ("/v1/models", lambda body: body["error"]["code"] == "forbidden_origin"),
    ],
)
def test_refusals_have_the_form_of_the_address_and_end_the_connection(path: str, is_expected: Any, app: Any) -> None:
    response = post(app, path, {}, Origin="https://evil.example")
    assert (response.status_code, response.headers["connection"]) == (403, "close")
    assert is_expected(response.json())


class Reader:
    """A client that asks for a stream, and takes each part of it in the time that `takes_s` says; None: never."""

    def __init__(self, answering: MemoryAnswering, takes_s: float | None, settings: ServiceSettings) -> None:
        self.service = Service(answering, settings)
        self.parts: list[bytes] = []
        self._takes_s = takes_s

    def ask(self) -> None:
        inner = build_app(self.service, GuardSettings())
        body = json.dumps({"messages": MESSAGES, "stream": True}).encode()
        scope = {
            "type": "http", "method": "POST", "path": "/v1/chat/completions", "raw_path": b"", "query_string": b"", "state": {},
            "headers": [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())], "root_path": "", "scheme": "http",
        }  # fmt: skip
        told: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            return told.pop() if told else await asyncio.Event().wait()

        asyncio.run(asyncio.wait_for(inner(scope, receive, self._take), 20))

    async def _take(self, message: Any) -> None:
        if message["type"] != "http.response.body":
            return
        if self._takes_s is None:
            await asyncio.Event().wait()
        elif self._takes_s:
            await asyncio.sleep(self._takes_s)
        self.parts.append(message["body"])


def test_a_client_that_stops_reading_loses_its_turn() -> None:
    answering = MemoryAnswering("Hi there")
    reader = Reader(answering, None, ServiceSettings(reader_patience_s=0.01))
    reader.ask()
    assert reader.parts == []
    assert (reader.service.gate.admission.running_count, answering.model.running) == (0, 0)


def test_a_client_that_sips_its_answer_loses_its_turn() -> None:
    """No single wait is long enough to be one that has stopped."""
    answering = MemoryAnswering("Hi there" * 100)
    reader = Reader(answering, 0.02, ServiceSettings(reader_patience_s=0.5, least_reading_bytes_per_s=1e6))
    reader.ask()
    assert 1 < len(reader.parts) < 50
    assert (reader.service.gate.admission.running_count, answering.model.running) == (0, 0)


def test_a_client_that_waits_for_a_slow_answer_keeps_its_turn() -> None:
    answering = MemoryAnswering("Hi there")
    answering.model.step_s = 0.1
    reader = Reader(answering, 0.0, ServiceSettings(reader_patience_s=0.5, least_reading_bytes_per_s=1e6))
    reader.ask()
    assert reader.parts[-1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("asked", "is_granted"),
    [("x-stainless-lang, authorization,anthropic-version", True), ("a\tb: c", False), ("", False)],
)
def test_an_sdk_in_a_page_of_a_named_site_may_send_its_own_headers(asked: str, is_granted: bool) -> None:
    app = app_of(MemoryAnswering(), guard=GuardSettings(allowed_origins=frozenset({"https://chat.example"})))
    headers = {
        "Origin": "https://chat.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": asked,
        "Access-Control-Request-Private-Network": "true",
    }  # fmt: skip
    response = with_client(app, lambda client: client.options("/v1/messages", headers=headers))
    assert response.status_code == 204
    assert (response.headers["access-control-allow-headers"] == asked) == is_granted
    assert response.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in response.headers
