"""Chat templates: renderings equal to transformers', fallbacks, and messages that are none."""

import threading
from datetime import datetime

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from potluck.core.errors import BadRequest, BadTemplate
from potluck.core.tokenizer_spec import CONTROL, NORMAL, TokenizerSpec
from potluck.text.chat_template import ChatTemplate
from tests.support import chat_templates

NOON = datetime(2025, 3, 4, 12, 0, 0)
USER = {"role": "user", "content": "  What is 2 + 2? <b>&'\"</b> \n"}
ASSISTANT = {"role": "assistant", "content": "Vier.\n\n<think>hm</think> 4 "}
SYSTEM = {"role": "system", "content": "Be brief. Ünïcode 漢字."}
CONVERSATIONS = {
    "question": [USER],
    "three": [USER, ASSISTANT, USER],
    "system": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": ""}],
    "tools": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, None, True], "é": "<ß>"}}}],
        },
        {"role": "tool", "content": "42"},
        USER,
    ],
}
CHATML_RENDERING = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}]


def spec_with(*tokens: str, **fields: object) -> TokenizerSpec:
    vocabulary = ("<unk>", "<s>", "</s>", *tokens)
    kinds = (NORMAL,) + (CONTROL,) * (len(vocabulary) - 1)
    settings = {"algorithm": "byte_bpe", "bos_id": 1, "eos_ids": (2,), "unknown_id": 0} | fields
    return TokenizerSpec(tokens=vocabulary, kinds=kinds, **settings)  # type: ignore[arg-type]


def transformers_rendering(source: str, **arguments: object) -> str:
    messages = arguments.pop("messages")
    arguments |= {"bos_token": "<s>", "eos_token": "</s>"}
    rendered, _ = render_jinja_template([messages], chat_template=source, **arguments)
    return rendered[0]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "with-tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", chat_templates.ALL)
def test_renders_as_transformers_does(
    family: str, conversation: str, add_generation_prompt: bool, tools: list[dict[str, object]] | None
) -> None:
    source = chat_templates.ALL[family]
    messages = CONVERSATIONS[conversation]
    arguments = {"add_generation_prompt": add_generation_prompt, "tools": tools, "date_string": "1 Jan 2025"}
    template = ChatTemplate(source, spec_with())
    try:
        expected = transformers_rendering(source, messages=messages, **arguments)
    except TemplateError:
        with pytest.raises(BadTemplate):
            template.render(messages, **arguments)
    else:
        assert template.render(messages, **arguments) == expected


def test_the_date_comes_from_the_given_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", spec_with(), now=lambda: NOON)
    assert template.render([USER]) == "04 Mar 2025"


def test_a_refusal_of_the_template_is_told() -> None:
    with pytest.raises(BadTemplate, match="roles must alternate"):
        ChatTemplate(chat_templates.GEMMA, spec_with()).render([USER, USER])


@pytest.mark.parametrize(
    ("tokens", "fields", "expected"),
    [
        (("<|im_start|>",), {}, CHATML_RENDERING),
        (
            ("<|start_header_id|>",),
            {},
            "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
            "U<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (("<start_of_turn>",), {}, "<s><start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\n"),
        (("<|user|>", "<|end|>"), {}, "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n"),
        ((), {"algorithm": "sentencepiece"}, "<s>[INST] S\n\nU [/INST]"),
        ((), {}, CHATML_RENDERING),
    ],
)
def test_fallbacks_follow_the_vocabulary(tokens: tuple[str, ...], fields: dict[str, object], expected: str) -> None:
    template = ChatTemplate(None, spec_with(*tokens, **fields))
    assert template.is_fallback
    assert template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]) == expected


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hello",
        ["hello"],
        [{}],
        [{"role": "user"}],
        [{"role": 3, "content": "x"}],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", 3: "y"}],
        [{"role": "user", "content": "x", "extra": object()}],
        [{"role": "user", "content": "x", "extra": 1 << 100}],
        [{"role": "user", "content": "x" * (1 << 23)}],
    ],
)
def test_bad_messages_are_the_callers_fault(messages: object) -> None:
    with pytest.raises(BadRequest):
        ChatTemplate(None, spec_with()).render(messages)  # type: ignore[arg-type]


def test_an_endlessly_nested_message_is_refused() -> None:
    nested: list[object] = []
    nested.append(nested)
    with pytest.raises(BadRequest):
        ChatTemplate(None, spec_with()).render([{"role": "user", "content": "x", "extra": nested}])


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% if x %}", "{{ x | nonsense }}", "{% include 'a' %}", "{%"])
def test_templates_that_do_not_compile(source: str) -> None:
    with pytest.raises(BadTemplate, match="chat template"):
        ChatTemplate(source, spec_with()).render([USER])


def test_a_long_conversation_is_within_the_budget() -> None:
    messages = [SYSTEM, *[{"role": role, "content": "word " * 200} for role in ("user", "assistant")] * 500]
    rendered = ChatTemplate(chat_templates.QWEN3, spec_with()).render(messages)
    assert len(rendered) > 1_000_000


def test_renderings_in_threads_do_not_disturb_each_other() -> None:
    template = ChatTemplate(chat_templates.CHATML, spec_with())
    results: list[str] = []

    def render(number: int) -> None:
        results.append(template.render([{"role": "user", "content": str(number)} for _ in range(50)]))

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {template.render([{"role": "user", "content": str(n)} for _ in range(50)]) for n in range(8)}
    assert set(results) == expected
