"""Completions, responses, Anthropic's and Ollama's addresses, tokenizer routes: each in its own form over the same model."""

import json

import numpy as np
import pytest

from potluck.engine.sampling import choose
from potluck.gateway.anthropic_messages import read_messages
from potluck.gateway.events import Usage
from potluck.gateway.openai_chat import read_chat
from potluck.gateway.surface import CollectedChoice
from potluck.orchestrator.frames import PipelineAborted
from potluck.testing.memory_answering import MemoryAnswering
from tests.support.api import MESSAGES, TOOLS, app_of, deltas_of, events_of, get, post, with_client

CALL = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANTHROPIC_TOOL = {"name": "weather", "description": "x", "input_schema": TOOLS[0]["function"]["parameters"]}
RESPONSES_TOOL = {"type": "function", "name": "weather", "parameters": TOOLS[0]["function"]["parameters"]}


def broken() -> MemoryAnswering:
    answering = MemoryAnswering("Hi there")
    answering.model.frames_before = {2: [PipelineAborted("pipeline_stalled", "no progress", 2)]}
    return answering


# ------------------------------------------------------------ completions


def complete(answering: MemoryAnswering, **fields: object):
    return post(app_of(answering), "/v1/completions", {"model": "memory", "prompt": "Once", **fields})


@pytest.mark.parametrize(("prompt", "choices"), [("a", 1), ([5, 6], 1), (["a", "b"], 2), ([[5], [6], [7]], 3)])
def test_prompts_are_texts_or_tokens_or_lists_of_them(prompt: object, choices: int) -> None:
    body = complete(MemoryAnswering(lambda request: f"{len(request.prompt)}"), prompt=prompt).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(choices))
    assert body["object"] == "text_completion"


@pytest.mark.parametrize("prompt", [[], [1, "a"], [[]], [100_000], [-1], "", {}, [[1], "a", 3]])
def test_other_prompts_are_refused(prompt: object) -> None:
    assert complete(MemoryAnswering(), prompt=prompt).json()["error"]["code"] == "bad_request"


def test_echo_puts_the_prompt_before_the_text() -> None:
    assert complete(MemoryAnswering(" upon"), echo=True).json()["choices"][0]["text"] == "Once upon"


def test_logprobs_are_four_lists_side_by_side() -> None:
    shown = complete(MemoryAnswering("abc"), logprobs=2).json()["choices"][0]["logprobs"]
    assert (shown["tokens"], shown["text_offset"]) == (["a", "b", "c"], [0, 1, 2])
    assert shown["token_logprobs"] == [-0.5] * 3
    assert all(max(top.values()) == -0.5 for top in shown["top_logprobs"])


def test_a_suffix_is_refused() -> None:
    assert complete(MemoryAnswering(), suffix="end").json()["error"]["code"] == "unsupported_parameter"


def test_completions_stream() -> None:
    events = [data for _, data in events_of(complete(MemoryAnswering("abc"), stream=True))]
    assert events[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in events[:-1]) == "abc"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


# ------------------------------------------------------------ responses


def respond(answering: MemoryAnswering, **fields: object):
    return post(app_of(answering), "/v1/responses", {"model": "memory", "input": "Hello", **fields})


def test_a_response_streams_its_events_in_order_each_with_type_and_number() -> None:
    events = events_of(respond(MemoryAnswering("Hi"), stream=True))
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    kinds = [name for name, _ in events]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    final = events[-1][1]["response"]
    assert final["output"][0]["content"][0]["text"] == "Hi"
    assert final["usage"]["output_tokens"] == 3


def test_a_response_streams_a_function_call_after_the_text() -> None:
    events = events_of(respond(MemoryAnswering(CALL), stream=True, tools=[RESPONSES_TOOL]))
    kinds = [name for name, _ in events]
    assert kinds.index("response.output_text.done") < kinds.index("response.function_call_arguments.delta")
    [done] = [data for name, data in events if name == "response.function_call_arguments.done"]
    assert json.loads(done["arguments"]) == {"city": "Oslo"}
    assert [item["type"] for item in events[-1][1]["response"]["output"]] == ["message", "function_call"]


def test_a_whole_response_and_its_history() -> None:
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "reasoning", "summary": []},
    ]
    seen: list[str] = []

    def script(request) -> str:
        seen.append(answering.model.tokenizer.decode(request.prompt))
        return "It rains."

    answering = MemoryAnswering(script)
    body = respond(answering, input=history, instructions="Be brief.", tools=[RESPONSES_TOOL]).json()
    assert (body["status"], body["output"][0]["content"][0]["text"]) == ("completed", "It rains.")
    assert "Be brief." in seen[0]
    assert "rain" in seen[0]
    assert '"city"' in seen[0]


@pytest.mark.parametrize("fields", [{"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "c"}])
def test_state_that_is_not_kept_is_refused(fields: dict[str, object]) -> None:
    assert respond(MemoryAnswering(), **fields).json()["error"]["code"] == "unsupported_parameter"


def test_a_response_that_fails_says_so_in_its_stream() -> None:
    events = events_of(respond(broken(), stream=True))
    assert [name for name, _ in events[-2:]] == ["response.failed", "error"]
    assert all(name == data["type"] for name, data in events)
    assert events[-2][1]["response"]["error"]["code"] == "pipeline_stalled"
    assert [item["status"] for item in events[-2][1]["response"]["output"]] == ["incomplete"]


# ------------------------------------------------------------ Anthropic


def message(answering: MemoryAnswering, **fields: object):
    body = {"model": "memory", "messages": MESSAGES, "max_tokens": 200, **fields}
    return post(app_of(answering), "/v1/messages", body)


def test_a_message_streams_its_events_in_order() -> None:
    events = events_of(message(MemoryAnswering("Hi"), stream=True))
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [name for name, _ in events] == [
        "message_start", "ping", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    count = post(app_of(MemoryAnswering()), "/v1/messages/count_tokens", {"messages": MESSAGES}).json()
    assert events[0][1]["message"]["usage"]["input_tokens"] == count["input_tokens"] > 5
    assert events[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 3


def test_a_message_with_a_tool_call_has_two_blocks() -> None:
    events = [data for _, data in events_of(message(MemoryAnswering(CALL), stream=True, tools=[ANTHROPIC_TOOL]))]
    starts = [data["content_block"]["type"] for data in events if data["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    pieces = [d["delta"]["partial_json"] for d in events if d.get("delta", {}).get("type") == "input_json_delta"]
    assert json.loads("".join(pieces)) == {"city": "Oslo"}
    whole = message(MemoryAnswering(CALL), tools=[ANTHROPIC_TOOL]).json()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert (whole["content"][1]["input"], whole["stop_reason"]) == ({"city": "Oslo"}, "tool_use")


def test_system_texts_and_tools_are_counted() -> None:
    def count(**fields: object) -> int:
        body = {"messages": MESSAGES, **fields}
        return post(app_of(MemoryAnswering()), "/v1/messages/count_tokens", body).json()["input_tokens"]

    assert count() < count(system="Be brief.") < count(system="Be brief.", tools=[ANTHROPIC_TOOL])


def test_a_stop_sequence_is_named() -> None:
    body = message(MemoryAnswering("one two"), stop_sequences=[" t"]).json()
    assert (body["content"][0]["text"], body["stop_reason"], body["stop_sequence"]) == ("one", "stop_sequence", " t")


def test_anthropic_errors_have_anthropics_form() -> None:
    missing = message(MemoryAnswering(), model="other")
    assert (missing.status_code, missing.json()["type"]) == (404, "error")
    assert missing.json()["error"]["type"] == "not_found_error"
    assert message(MemoryAnswering(), max_tokens=None).json()["error"]["type"] == "invalid_request_error"
    assert message(MemoryAnswering(), thinking={"type": "sometimes"}).status_code == 400
    assert events_of(message(broken(), stream=True))[-1][0] == "error"


# ------------------------------------------------------------ Ollama


def lines_of(response) -> list[dict]:
    return [json.loads(line) for line in response.text.splitlines()]


def test_ollama_streams_unless_told_otherwise() -> None:
    app = app_of(MemoryAnswering("Hi"))
    streamed = lines_of(post(app, "/api/chat", {"model": "memory:latest", "messages": MESSAGES}))
    assert "".join(line["message"]["content"] for line in streamed) == "Hi"
    assert [line["done"] for line in streamed] == [False, False, True]
    assert (streamed[-1]["done_reason"], streamed[-1]["eval_count"]) == ("stop", 3)
    whole = post(app, "/api/generate", {"model": "memory", "prompt": "x", "stream": False}).json()
    assert (whole["response"], whole["done"]) == ("Hi", True)
    assert post(app, "/api/generate", {"model": "memory"}).json()["done_reason"] == "load"


def test_ollama_gets_tool_calls_as_objects() -> None:
    body = {"model": "memory", "messages": MESSAGES, "tools": TOOLS, "stream": False}
    message = post(app_of(MemoryAnswering(CALL)), "/api/chat", body).json()["message"]
    assert message["tool_calls"] == [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]


def test_ollama_is_not_shown_a_call_that_was_cut_short() -> None:
    body = {"model": "memory", "messages": MESSAGES, "tools": TOOLS, "options": {"num_predict": len(CALL) - 20}}
    for is_streaming in (True, False):
        response = post(app_of(MemoryAnswering(CALL)), "/api/chat", {**body, "stream": is_streaming})
        assert "tool_calls" not in response.text
        assert '"done_reason":"length"' in response.text


def test_ollama_errors_are_plain_strings() -> None:
    response = post(app_of(MemoryAnswering()), "/api/chat", {"model": "other", "messages": MESSAGES})
    assert response.status_code == 404
    assert isinstance(response.json()["error"], str)
    assert "error" in lines_of(post(app_of(broken()), "/api/chat", {"messages": MESSAGES}))[-1]
    bad = post(app_of(MemoryAnswering()), "/api/chat", {"messages": MESSAGES, "options": {"mirostat": 2}})
    assert bad.status_code == 400


def test_ollamas_lists_tell_context_and_abilities() -> None:
    app = app_of(MemoryAnswering())
    assert get(app, "/").text == "Ollama is running"
    assert get(app, "/api/version").json()["version"]
    assert get(app, "/api/tags").json()["models"][0]["name"] == "memory"
    assert get(app, "/api/ps").json()["models"][0]["context_length"] == 4096
    shown = post(app, "/api/show", {"model": "memory"}).json()
    assert shown["model_info"]["llama.context_length"] == 4096
    assert "tools" in shown["capabilities"]


# ------------------------------------------------------------ the rest


def test_models_have_their_context() -> None:
    app = app_of(MemoryAnswering(names=("memory", "other")))
    assert [model["id"] for model in get(app, "/v1/models").json()["data"]] == ["memory", "other"]
    assert get(app, "/v1/models/other").json()["max_model_len"] == 4096
    assert get(app, "/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_texts_become_tokens_and_back() -> None:
    app = app_of(MemoryAnswering())
    tokens = post(app, "/tokenize", {"prompt": "Zoë"}).json()
    assert tokens["count"] == len(tokens["tokens"]) == 4
    assert post(app, "/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"] == "Zoë"
    assert post(app, "/tokenize", {"messages": MESSAGES}).json()["count"] > 5
    assert post(app, "/detokenize", {"tokens": [10**9]}).status_code == 400
    long = "a" * 5_000_000
    for body in ({"prompt": long}, {"messages": [{"role": "user", "content": long}]}):
        assert post(app, "/tokenize", body).json()["error"]["code"] == "context_length_exceeded"
    assert get(app, "/tokenizer_info").json()["eos_token"] == "<|im_end|>"


def test_unknown_addresses_and_methods_have_our_form() -> None:
    app = app_of(MemoryAnswering())
    assert get(app, "/nowhere").json()["error"]["code"] == "not_found"
    assert get(app, "/v1/chat/completions").json()["error"]["code"] == "method_not_allowed"


def test_metrics_count_requests_and_tokens() -> None:
    app = app_of(MemoryAnswering("Hi"))
    post(app, "/v1/chat/completions", {"messages": MESSAGES})
    post(app, "/v1/chat/completions", {"messages": MESSAGES, "model": "other"})
    page = get(app, "/metrics").text
    assert "vllm:generation_tokens_total 3.0" in page
    assert 'vllm:request_success_total{finished_reason="stop"} 1.0' in page
    assert 'potluck_api_errors_total{code="model_not_found"} 1.0' in page


def test_the_first_delta_of_a_chat_is_the_role_whatever_follows() -> None:
    body = {"messages": MESSAGES, "stream": True, "tools": TOOLS}
    chunks = deltas_of(post(app_of(MemoryAnswering(CALL)), "/v1/chat/completions", body))
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_what_claude_code_sends_with_every_request_is_taken() -> None:
    sent = {
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}, "metadata": {"user_id": "x"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "tools": [],
        "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
    }  # fmt: skip
    assert message(MemoryAnswering("Hi"), **sent).json()["content"][0]["text"] == "Hi"
    lost = message(MemoryAnswering(), context_management={"edits": [{"type": "clear_tool_uses_20250919"}]})
    assert (lost.status_code, lost.json()["error"]["code"]) == (400, "unsupported_parameter")


def test_tools_that_only_a_server_could_run_are_left_out_and_the_response_says_so() -> None:
    tools = [RESPONSES_TOOL, {"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": []}]
    assert respond(MemoryAnswering("Hi"), tools=tools).json()["tools"] == [RESPONSES_TOOL]
    assert respond(MemoryAnswering(), tools=tools, tool_choice="required").status_code == 400
    assert respond(MemoryAnswering(), text={"verbosity": "low"}).json()["error"]["param"] == "text"


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/api/embed", "/api/pull", "/v1/responses/resp_1", "/v1/images/edits"]
)
def test_addresses_that_are_not_offered_say_why_and_that_asking_again_is_no_use(path: str) -> None:
    response = post(app_of(MemoryAnswering()), path, {"model": "memory", "input": "x"})
    assert (response.status_code, response.headers["x-should-retry"]) == (501, "false")
    error = response.json()["error"]
    assert error["code"] == "not_offered" if path.startswith("/v1") else "here" in error or "potluck pull" in error


def test_a_wrong_method_is_told_the_right_one() -> None:
    assert get(app_of(MemoryAnswering()), "/v1/chat/completions").headers["allow"] == "POST"


def test_an_answer_that_was_begun_is_gone_on_with() -> None:
    """Anthropic's clients put the first words of the answer into its mouth; as a turn of its own it would be lost."""
    seen: list[str] = []

    def script(request) -> str:
        seen.append(answering.model.tokenizer.decode(request.prompt))
        return " a dish."

    answering = MemoryAnswering(script)
    begun = [*MESSAGES, {"role": "assistant", "content": "Everyone brings"}]
    assert message(answering, messages=begun).json()["content"][0]["text"] == " a dish."
    assert seen[0].endswith("assistant\nEveryone brings")


def test_anthropics_sdk_finds_its_own_fields_in_the_list_of_models() -> None:
    body = get(app_of(MemoryAnswering()), "/v1/models").json()
    assert (body["has_more"], body["first_id"], body["data"][0]["type"]) == (False, "memory", "model")
    assert body["data"][0]["created_at"].endswith("Z")


def test_calls_that_stand_side_by_side_are_one_turn_of_the_model() -> None:
    calls = [{"type": "function_call", "call_id": f"c{n}", "name": "weather", "arguments": "{}"} for n in range(3)]
    answers = [{"type": "function_call_output", "call_id": f"c{n}", "output": "rain"} for n in range(3)]
    seen: list[str] = []

    def script(request) -> str:
        seen.append(answering.model.tokenizer.decode(request.prompt))
        return "Rain."

    answering = MemoryAnswering(script)
    question = {"role": "user", "content": "Weather?"}
    assert respond(answering, input=[question, *calls, *answers], tools=[RESPONSES_TOOL]).status_code == 200
    assert seen[0].count("assistant\n") == 2  # the turn with the three calls, and the one that is to come
    assert seen[0].count('<tool_call>\n{"name": "weather"') == 3
    assert respond(MemoryAnswering(), input=[question, *calls * 100]).json()["error"]["code"] == "bad_request"


@pytest.mark.parametrize(
    "path", ["/", "/health", "/v1/models", "/v1/models/memory", "/api/tags", "/api/version", "/metrics"]
)
def test_whoever_only_wants_to_know_that_somebody_is_there_may_ask_with_head(path: str) -> None:
    app = app_of(MemoryAnswering())
    assert with_client(app, lambda client: client.head(path)).status_code == 200
    assert with_client(app, lambda client: client.head("/v1/messages")).headers["allow"] == "POST"


def test_errors_that_have_no_name_of_their_own_at_anthropics_are_told_by_whose_fault_they_are() -> None:
    assert get(app_of(MemoryAnswering()), "/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert message(broken()).json()["error"]["type"] == "timeout_error"


SURFACES = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5},
}
ODD_SAMPLING = [
    {"seed": "x"}, {"seed": 1.5}, {"min_p": "x"}, {"presence_penalty": []}, {"repetition_penalty": {}}, {"logit_bias": 5},
    {"logit_bias": {"5": "x"}}, {"top_k": "x"}, {"temperature": True},
]  # fmt: skip


@pytest.mark.parametrize("path", SURFACES)
@pytest.mark.parametrize("fields", ODD_SAMPLING, ids=str)
def test_sampling_fields_of_wrong_types_are_refused_wherever_they_come(path: str, fields: dict[str, object]) -> None:
    """Also at addresses whose own clients never send them."""
    assert post(app_of(MemoryAnswering()), path, SURFACES[path] | fields).status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "complaint"),
    [
        ("/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
        ("/v1/responses", {"input": "x", "tools": [{"type": []}]}, "tools[0]"),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 5, "output_config": {"format": 5}},
            "output_config.format",
        ),
        ("/api/chat", {"messages": MESSAGES, "format": "json", "tools": TOOLS}, "together with tools"),
        ("/api/chat", {"messages": MESSAGES, "options": {"temperature": "x"}}, "temperature: Expected"),
        ("/v1/completions", {"prompt": "x", "logprobs": -1}, "logprobs must be from 0 to 20"),
        ("/v1/messages", {"messages": MESSAGES}, "max_tokens is missing"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
    ],
)
def test_what_would_be_lost_in_silence_is_refused_by_name(path: str, fields: dict, complaint: str) -> None:
    response = post(app_of(MemoryAnswering()), path, fields)
    assert response.status_code == 400
    assert complaint in response.text


def test_anthropics_input_tokens_are_those_that_no_cache_gave() -> None:
    """Its clients add all three up to learn how full the context is."""
    _, surface = read_messages(json.dumps({"messages": MESSAGES, "max_tokens": 5}).encode(), 0)
    usage = Usage(prompt_tokens=33, cached_tokens=32, completion_tokens=2)
    shown = surface.body([CollectedChoice(0, text="Hi")], usage)["usage"]
    assert (shown["input_tokens"], shown["cache_read_input_tokens"], shown["output_tokens"]) == (1, 32, 2)


def test_a_response_that_was_cut_short_says_so_of_its_last_item_too() -> None:
    events = events_of(respond(MemoryAnswering("Hello"), stream=True, max_output_tokens=2))
    assert [name for name, _ in events[-2:]] == ["response.output_item.done", "response.incomplete"]
    assert events[-2][1]["item"]["status"] == events[-1][1]["response"]["output"][0]["status"] == "incomplete"
    whole = respond(MemoryAnswering("Hello"), max_output_tokens=2).json()
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")


def test_a_call_that_the_model_broke_off_is_incomplete_in_a_response_that_is_not() -> None:
    broken_off = CALL[: CALL.index("Oslo")]
    events = events_of(respond(MemoryAnswering(broken_off), stream=True, tools=[RESPONSES_TOOL]))
    assert [name for name, _ in events[-2:]] == ["response.output_item.done", "response.completed"]
    assert events[-2][1]["item"]["status"] == events[-1][1]["response"]["output"][-1]["status"] == "incomplete"
    for text, status in ((broken_off, "incomplete"), (CALL, "completed")):
        whole = respond(MemoryAnswering(text), tools=[RESPONSES_TOOL]).json()
        item = whole["output"][-1]
        assert (whole["status"], item["type"], item["status"]) == ("completed", "function_call", status)


def sampled(path: str, body: dict[str, object]):
    """The generation that comes of it."""
    answering = MemoryAnswering("Hi")
    response = post(app_of(answering), path, {"model": "memory", "messages": MESSAGES, "stream": False, **body})
    assert response.status_code == 200, response.text
    [request] = answering.model.requests
    return request


def test_ollamas_words_for_no_limit_and_no_seed() -> None:
    asked = [sampled("/api/chat", {"options": {"seed": -1, "num_predict": limit}}) for limit in (0, -1, -2)]
    assert len({request.params.seed for request in asked}) == 3
    assert len({request.max_tokens for request in asked}) == 1
    assert sampled("/api/chat", {"options": {"seed": 7, "num_predict": 3}}).params.seed == 7


def test_a_top_p_of_zero_leaves_the_likeliest_token() -> None:
    params = sampled("/v1/chat/completions", {"top_p": 0, "temperature": 1}).params
    assert choose(np.array([1.0, 1.5, 1.4], np.float32), params).token == 1


def test_a_function_call_of_old_is_a_tool_call() -> None:
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    [old, new] = [
        read_chat(json.dumps({"messages": [*MESSAGES, {"role": "assistant", "content": None, **fields}]}).encode(), 1)[
            0
        ]
        for fields in ({"function_call": call}, {"tool_calls": [{"type": "function", "function": call}]})
    ]
    assert old.conversation == new.conversation
    assert old.conversation.messages[-1]["tool_calls"][0]["function"] == call
    refused = post(
        app_of(MemoryAnswering()), "/v1/chat/completions", {"messages": [{"role": "assistant", "function_call": "x"}]}
    )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_a_format_for_an_answer_that_is_begun_is_refused() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": '{"a":'}]
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    body = {"model": "memory", "max_tokens": 9, "messages": messages, "output_config": form}
    refused = post(app_of(MemoryAnswering()), "/v1/messages", body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


def test_a_response_gives_back_what_it_was_labelled_with() -> None:
    body = {"model": "memory", "input": "Hi", "metadata": {"k": "v"}}
    assert post(app_of(MemoryAnswering("Hi")), "/v1/responses", body).json()["metadata"] == {"k": "v"}
