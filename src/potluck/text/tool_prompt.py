"""Conversations with tools as a model's template wants them, or as plain messages where the template knows no tools.

For the latter: Hermes' instructions in the system message, which most instruction models follow, and calls and results as text.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from potluck.core.errors import BadTemplate
from potluck.text.chat_template import ChatTemplate
from potluck.text.template_budget import weigh

_INSTRUCTIONS = """\
You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{signatures}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_KNOWS_TOOLS = re.compile(r"\btools\b")

Message = Mapping[str, Any]


def template_knows_tools(source: str | None) -> bool:
    return source is not None and _KNOWS_TOOLS.search(source) is not None


def render_conversation(
    template: ChatTemplate, source: str | None, messages: Sequence[Message], tools: Sequence[Message],
    variables: Mapping[str, Any],
) -> str:  # fmt: skip
    """The prompt. Calls of earlier turns, and their results, are told in the model's own way where its template has one."""
    if template_knows_tools(source):
        return template.render(
            [_with_decoded_calls(message) for message in messages], tools=list(tools) or None, **variables
        )
    return template.render(_as_plain(messages, tools), **variables)


def _with_decoded_calls(message: Message) -> dict[str, Any]:
    """Templates write arguments with `tojson`; OpenAI's clients send them as text already."""
    plain = dict(message)
    if plain.get("content") is None:
        plain["content"] = ""
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_decoded_call(call) for call in plain["tool_calls"]]
    return plain


def _decoded_call(call: Message) -> dict[str, Any]:
    function = dict(call["function"])
    function["arguments"] = _decoded(function.get("arguments"))
    return {**call, "function": function}


def _decoded(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = msgspec.json.decode(arguments)
        weigh(value)  # numbers of more than 64 bits, say: as text a model may well have written them
    except (msgspec.DecodeError, RecursionError, BadTemplate):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_plain(messages: Sequence[Message], tools: Sequence[Message]) -> list[dict[str, Any]]:
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    signatures = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
    instructions = _INSTRUCTIONS.format(signatures=signatures)
    if plain and plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{instructions}"}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _plain(message: Message) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [_decoded_call(call)["function"] for call in message.get("tool_calls") or ()]
    written = [
        f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {msgspec.json.encode(call["arguments"]).decode()}}}\n</tool_call>'
        for call in calls
    ]
    return {"role": message["role"], "content": "\n".join([content, *written] if content else written)}
