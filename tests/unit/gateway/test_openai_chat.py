"""Chat completions as OpenAI's SDKs read them, over a model whose answers a script writes."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from openai._streaming import SSEDecoder

from potluck.core.errors import ShardsFull, ShardUnavailable
from potluck.gateway.admission import AdmissionSettings
from potluck.gateway.responding import ServiceSettings, beside_the_loop
from potluck.orchestrator.frames import PipelineAborted, ShardFailover, StreamFrame
from potluck.testing.memory_answering import MemoryAnswer, MemoryAnswering
from tests.support.api import MESSAGES, TOOLS, app_of, deltas_of, events_of, post

PATH = "/v1/chat/completions"


def ask(answering: MemoryAnswering, **fields: object):
    return post(app_of(answering), PATH, {"model": "memory", "messages": MESSAGES, **fields})


def test_a_stream_begins_with_the_role_and_ends_with_reason_usage_and_done() -> None:
    response = ask(MemoryAnswering("Hi"), stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    [role, *texts, finish, usage, done] = [data for _, data in events_of(response)]
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in texts) == "Hi"
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert (usage["usage"]["completion_tokens"], done) == (3, "[DONE]")
    assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 3
    assert len({(c["id"], c["created"], c["object"]) for c in (role, *texts, finish, usage)}) == 1
    assert role["object"] == "chat.completion.chunk"


def test_without_being_asked_for_usage_no_chunk_has_any() -> None:
    response = ask(MemoryAnswering("Hi"), stream=True)
    assert all("usage" not in chunk for chunk in deltas_of(response))


def test_a_whole_answer_names_failovers_nodes_and_exactness_in_its_usage() -> None:
    answering = MemoryAnswering("Hi")
    answering.model.frames_before = {1: [ShardFailover(("a",), ("b",), 1, 120.0, 5, "replay", "mixed")]}
    body = ask(answering).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    assert body["usage"]["potluck"] == {
        "failovers": 1, "pause_ms": 120.0, "nodes": ["aa" * 32, "bb" * 32], "exactness": "bitwise",
    }  # fmt: skip


def test_tool_calls_are_streamed_as_accumulators_expect_them() -> None:
    text = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    response = ask(MemoryAnswering(text), stream=True, tools=TOOLS)
    deltas = [chunk["choices"][0]["delta"] for chunk in deltas_of(response)]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["index"] == 0
    assert calls[0]["type"] == "function"
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert len(calls[0]["id"]) == 9
    assert all(set(call) == {"index", "function"} and "name" not in call["function"] for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"city": "Oslo"}
    assert "".join(delta.get("content", "") for delta in deltas) == "Well.\n"
    assert deltas_of(response)[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_whole_answer_with_a_call_has_no_content_and_says_so() -> None:
    answering = MemoryAnswering('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>')
    choice = ask(answering, tools=TOOLS).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}


def test_with_tool_choice_none_a_call_is_text() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    choice = ask(MemoryAnswering(text), tools=TOOLS, tool_choice="none").json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_several_choices_have_their_own_indices() -> None:
    answering = MemoryAnswering(lambda request: f"choice {request.choice}")
    choices = ask(answering, n=3).json()["choices"]
    assert [(c["index"], c["message"]["content"]) for c in choices] == [(n, f"choice {n}") for n in range(3)]
    chunks = deltas_of(ask(answering, n=3, stream=True))
    for n in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == n]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == f"choice {n}"


def test_a_stop_string_across_tokens_is_not_part_of_the_answer_and_ends_the_generation() -> None:
    answering = MemoryAnswering("one two three")
    choice = ask(answering, stop=["o th"], logprobs=True).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one tw", "stop")
    assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "one tw"
    assert (answering.model.completed, answering.model.running) == (0, 0)


def test_logprobs_come_with_the_text_they_belong_to() -> None:
    response = ask(MemoryAnswering("é!"), stream=True, logprobs=True, top_logprobs=2)
    entries = [e for c in deltas_of(response) for e in (c["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], [0x21]]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_a_limit_ends_with_length() -> None:
    choice = ask(MemoryAnswering("abcdef"), max_completion_tokens=3, max_tokens=5).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"messages": []}, "bad_request", "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "bad_request", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "unsupported_parameter", "messages"),
        ({"messages": "x"}, "bad_request", "messages"),
        ({"temperature": 1000}, "bad_request", "temperature"),
        ({"n": 0}, "bad_request", "n"),
        ({"n": 1000}, "bad_request", "n"),
        ({"max_tokens": 0}, "bad_request", "max_tokens"),
        ({"max_completion_tokens": 0}, "bad_request", "max_completion_tokens"),
        ({"logit_bias": {"x": 1}}, "bad_request", "logit_bias"),
        ({"top_logprobs": 3}, "bad_request", "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "bad_request", "top_logprobs"),
        ({"stop": [""]}, "bad_request", "stop"),
        ({"logit_bias": {"100000": 1}}, "bad_request", "logit_bias"),
        ({"verbosity": "low"}, "unsupported_parameter", "verbosity"),
        ({"audio": {"voice": "x"}}, "unsupported_parameter", "audio"),
        ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
        ({"best_of": 3}, "unsupported_parameter", "best_of"),
        ({"functions": [{"name": "x"}]}, "unsupported_parameter", "functions"),
        ({"response_format": {"type": "xml"}}, "unsupported_parameter", "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS}, "unsupported_parameter", "response_format"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools"),
        ({"tool_choice": "required"}, "bad_request", "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}, "bad_request", "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "bad_request", "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_field_that_is_wrong(fields, code, param) -> None:
    response = ask(MemoryAnswering(), **fields)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_schema_that_is_too_long_for_the_wire_is_refused_before_a_shard_sees_it(path: str) -> None:
    """A shard takes what it cannot read for a broken peer, and everybody's answers go down with that link."""
    schema = {"enum": ["x" * 100] * 3000}
    answering = MemoryAnswering()
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    held = {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    bodies: list[dict] = (
        [{"format": schema}] if path == "/api/chat" else [held, {"tools": [tool], "tool_choice": "required"}]
    )
    for body in bodies:
        assert post(app_of(answering), path, {"messages": MESSAGES, **body}).status_code == 400
    assert answering.model.most_running == 0


@pytest.mark.parametrize(
    ("body", "complaint"),
    [(b"", "empty"), (b'{"user": "\\ud83d"}', "surrogate"), (b'{"user": "x', "truncated"), (b"{NaN}", "malformed")],
)
def test_a_body_that_is_no_json_hears_why(body: bytes, complaint: str) -> None:
    error = post(app_of(MemoryAnswering()), PATH, body).json()["error"]
    assert error["code"] == "bad_request"
    assert complaint in error["message"]


def test_only_large_bodies_are_worked_on_beside_the_loop() -> None:
    async def where(size_bytes: int) -> bool:
        return await beside_the_loop(size_bytes, threading.get_ident) == threading.get_ident()

    assert asyncio.run(where(1000))
    assert not asyncio.run(where(1 << 20))


def test_harmless_fields_and_nulls_are_ignored() -> None:
    fields = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "stop": None, "tools": None}
    assert ask(MemoryAnswering(), **fields, something_new=1, modalities=["text"], verbosity="medium").status_code == 200


def test_a_prompt_that_leaves_no_room_is_refused_before_anything_starts() -> None:
    answering = MemoryAnswering(context_length=40)
    response = ask(answering, messages=[{"role": "user", "content": "x" * 100}], stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answering.model.most_running == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_megabytes_that_cannot_fit_are_refused_without_being_tokenized(path: str) -> None:
    text = "x" * (1 << 20)
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    error = post(app_of(MemoryAnswering()), path, body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", next(iter(body)))
    assert "characters" in error["message"]


def test_an_unknown_model_is_not_found() -> None:
    response = ask(MemoryAnswering(), model="other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_without_a_model_the_only_one_answers() -> None:
    assert ask(MemoryAnswering(), model=None).json()["model"] == "memory"


def test_a_gap_in_the_pipeline_is_503_with_retry_after() -> None:
    answering = MemoryAnswering()
    answering.model.refusal = ShardUnavailable("no shard holds layer 3")
    response = ask(answering, stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shard_unavailable")
    assert int(response.headers["retry-after"]) >= 1


def test_where_every_shard_is_full_the_request_waits_for_room() -> None:
    answering = MemoryAnswering("Hi")
    looks = []

    def check(request: object) -> None:
        looks.append(request)
        if len(looks) < 3:
            raise ShardsFull("all are taken")

    answering.model.check = check  # type: ignore[method-assign]
    assert ask(answering).json()["choices"][0]["message"]["content"] == "Hi"
    assert len(looks) == 3


@pytest.mark.parametrize("body", [{"n": 3}, {"prompt": ["One", "two", "three"]}])
def test_choices_that_find_no_room_beside_the_first_follow_it(
    body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room is looked for once for the whole request, and each choice takes some."""
    answering = MemoryAnswering("Hi")
    model, frames = answering.model, MemoryAnswer.frames

    async def one_at_a_time(answer: MemoryAnswer) -> AsyncIterator[StreamFrame]:
        if model.running:
            raise ShardsFull("all are taken")
        async for frame in frames(answer):
            yield frame

    monkeypatch.setattr(MemoryAnswer, "frames", one_at_a_time)
    path = "/v1/completions" if "prompt" in body else PATH
    wanted = body if "prompt" in body else {"messages": MESSAGES, **body}
    response = post(app_of(answering), path, wanted)
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 3
    assert model.most_running == 1
    hasty = ServiceSettings(admission=AdmissionSettings(patience_s=0.0))
    assert post(app_of(answering, hasty), path, wanted).status_code == 503


def test_where_no_room_comes_in_time_it_is_503_with_retry_after() -> None:
    answering = MemoryAnswering()
    answering.model.refusal = ShardsFull("all are taken")
    settings = ServiceSettings(admission=AdmissionSettings(patience_s=0.0))
    response = post(app_of(answering, settings), "/v1/chat/completions", {"messages": MESSAGES})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shard_unavailable")
    assert int(response.headers["retry-after"]) >= 1


def test_a_failure_before_the_first_event_has_a_status_and_one_later_is_an_error_event() -> None:
    answering = MemoryAnswering("Hi there")
    answering.model.frames_before = {0: [PipelineAborted("pipeline_stalled", "no progress", 0)]}
    early = ask(answering, stream=True)
    assert (early.status_code, early.json()["error"]["code"]) == (504, "pipeline_stalled")
    answering.model.frames_before = {2: [PipelineAborted("pipeline_stalled", "no progress", 2)]}
    late = ask(answering, stream=True)
    assert late.status_code == 200
    assert events_of(late)[-1][1]["error"]["code"] == "pipeline_stalled"
    assert ask(answering).status_code == 504


@pytest.mark.parametrize("mode", ["events", "comments", "off"])
def test_diagnostics_are_in_the_stream_for_those_who_ask(mode: str) -> None:
    answering = MemoryAnswering("Hi")
    answering.model.frames_before = {1: [ShardFailover(("a",), ("b",), 1, 120.0, 5, "replay")]}
    body = {"messages": MESSAGES, "stream": True}
    response = post(app_of(answering), PATH, body, X_Potluck_Diagnostics=mode)
    named = [(name, data) for name, data in events_of(response) if name is not None]
    if mode == "off":
        assert named == []
    elif mode == "events":
        assert [(name, data["pause_ms"], data["choice"]) for name, data in named] == [("shard_failover", 120.0, 0)]
    else:
        assert named[0][0] == ":"
        assert named[0][1].startswith("shard_failover {")


def test_silence_is_filled_with_comments() -> None:
    answering = MemoryAnswering("Hi")
    answering.model.prefill_s = 0.4
    settings = ServiceSettings(keep_alive_s=0.02, status_wait_s=0.01)
    response = post(app_of(answering, settings), PATH, {"messages": MESSAGES, "stream": True})
    comments = [data for name, data in events_of(response) if name == ":"]
    assert len(comments) >= 1
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in deltas_of(response)) == "Hi"


@pytest.mark.parametrize("mode", ["events", "comments", "off"])
def test_openais_own_decoder_sees_no_event_in_a_comment(mode: str) -> None:
    """It keeps the last id, and then takes every empty line for the end of an event."""
    answering = MemoryAnswering("Hi")
    answering.model.prefill_s = 0.2
    answering.model.frames_before = {1: [ShardFailover(("a",), ("b",), 1, 120.0, 5, "replay")]}
    settings = ServiceSettings(keep_alive_s=0.02, status_wait_s=0.01)
    body = {"messages": MESSAGES, "stream": True}
    response = post(app_of(answering, settings), PATH, body, X_Potluck_Diagnostics=mode)
    assert ": still at work" in response.text
    events = list(SSEDecoder().iter_bytes(iter([response.content])))
    assert events.pop().data == "[DONE]"
    assert len(events) == 4 + (mode == "events")
    assert all(event.json() for event in events)


def test_no_text_ends_a_line() -> None:
    """Clients that read lines with httpx, Ollama's and ours among them, end one wherever Unicode does."""
    text = "a\u2028b\u2029c\u0085d\x0be\x1cf\rg\nh"
    for path, field in ((PATH, "choices"), ("/api/chat", "message")):
        response = post(app_of(MemoryAnswering(text)), path, {"model": "memory", "messages": MESSAGES, "stream": True})
        lines = [
            line.removeprefix("data: ")
            for line in response.text.splitlines()
            if line[:6] == "data: " or line[:1] == "{"
        ]
        shown = [msgspec.json.decode(line).get(field) for line in lines if line != "[DONE]"]
        texts = [
            each["content"] if field == "message" else each[0]["delta"].get("content", "") for each in shown if each
        ]
        assert "".join(texts) == text


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_client_that_goes_away_during_prefill_ends_its_generations(is_streaming: bool) -> None:
    answering = MemoryAnswering("Hi")
    answering.model.prefill_s = 3600.0
    body = json.dumps({"messages": MESSAGES, "stream": is_streaming, "n": 2}).encode()

    async def ask_and_leave() -> None:
        leaving = asyncio.Event()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if parts:
                return parts.pop()
            await leaving.wait()
            return {"type": "http.disconnect"}

        async def send(message) -> None:
            return

        headers = [(b"host", b"localhost"), (b"content-length", str(len(body)).encode())]
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": PATH,
            "raw_path": PATH.encode(), "root_path": "", "scheme": "http", "query_string": b"", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 7470),
        }  # fmt: skip
        asking = asyncio.create_task(app_of(answering)(scope, receive, send))
        while answering.model.running < 2:  # noqa: ASYNC110 - the model counts, and has no event
            await asyncio.sleep(0)
        leaving.set()
        await asyncio.wait_for(asking, 1.0)

    asyncio.run(ask_and_leave())
    assert (answering.model.running, answering.model.completed) == (0, 0)


def test_a_template_variable_may_have_any_other_name() -> None:
    assert ask(MemoryAnswering("Hi"), chat_template_kwargs={"self": 1, "variables": 2}).status_code == 200
