"""OpenAI's messages, tools and response formats as the internal conversation; the other surfaces translate to these first."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from potluck.core.errors import BadRequest, UnsupportedParameter
from potluck.core.grammar import Grammar
from potluck.gateway.request import Conversation, Json, Tool, ToolChoice

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")
MAX_MESSAGES = 4096
MAX_TOOLS = 256
_MAX_NAME_LENGTH = 128


def conversation(
    messages: Sequence[Json], tools: Sequence[Json] = (), choice: str | Json | None = None, *,
    allows_parallel_calls: bool = True, template_variables: Json | None = None, begun_answer: str = "",
) -> Conversation:  # fmt: skip
    """Raises BadRequest with the message or tool that is wrong, UnsupportedParameter for what no text model can do."""
    if not messages:
        raise BadRequest("there must be at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise BadRequest(f"there are more than {MAX_MESSAGES} messages", "messages")
    known = read_tools(tools)
    kind, name = _tool_choice(choice, known)
    return Conversation(
        messages=tuple(_message(number, message) for number, message in enumerate(messages)), tools=known, tool_choice=kind,
        named_tool=name, allows_parallel_calls=allows_parallel_calls, template_variables=_variables(template_variables or {}),
        begun_answer=begun_answer,
    )  # fmt: skip


def read_tools(tools: Sequence[Json]) -> tuple[Tool, ...]:
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"there are more than {MAX_TOOLS} tools", "tools")
    known = tuple(_tool(number, tool) for number, tool in enumerate(tools))
    if len({tool.name for tool in known}) != len(known):
        raise BadRequest("two tools have the same name", "tools")
    return known


def read_response_format(given: Mapping[str, Any] | None) -> Grammar | None:
    """`text`, `json_object`, `json_schema` (nested as in chat, or flat as in responses)."""
    kind = (given or {}).get("type", "text")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        nested = given.get("json_schema", given)
        schema = nested.get("schema") if isinstance(nested, dict) else None
        if not isinstance(schema, dict):
            raise BadRequest("response_format has no schema", "response_format")
        return Grammar("json_schema", msgspec.json.encode(schema).decode())
    raise UnsupportedParameter(f"response_format {str(kind)[:40]!r} is not known here", "response_format")


def check_together(grammar: Grammar | None, held: Conversation) -> None:
    """A format and tools exclude each other: text that is held to a schema cannot be a call, nor go on from an answer's beginning."""
    if grammar is not None and held.tools and held.tool_choice != "none":
        raise UnsupportedParameter("a response format cannot be had together with tools", "response_format")
    if grammar is not None and held.begun_answer:
        raise UnsupportedParameter("a format cannot be had for an answer that is already begun", "messages")


def _tool(number: int, given: object) -> Tool:
    place = f"tools[{number}]"
    if not isinstance(given, dict):
        raise BadRequest(f"{place} is not an object", "tools")
    if given.get("type", "function") != "function":
        raise UnsupportedParameter(f"{place}: only functions can be called, not {str(given['type'])[:40]!r}", "tools")
    function = given.get("function", given)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_LENGTH:
        raise BadRequest(f"{place} has no name of at most {_MAX_NAME_LENGTH} characters", "tools")
    description, parameters = function.get("description") or "", function.get("parameters") or {}
    if not isinstance(description, str) or not isinstance(parameters, dict):
        raise BadRequest(f"{place}: the description is no text, or the parameters are no schema", "tools")
    return Tool(name, description, parameters)


def _tool_choice(choice: str | Json | None, tools: Sequence[Tool]) -> tuple[ToolChoice, str | None]:
    if choice in (None, "auto"):
        return "auto", None
    if choice == "none":
        return "none", None
    if choice == "required":
        if not tools:
            raise BadRequest("tool_choice is required, and there are no tools", "tool_choice")
        return "required", None
    named: Any = choice.get("function", choice) if isinstance(choice, dict) else {}
    name = named.get("name") if isinstance(named, dict) else None
    if name not in [tool.name for tool in tools]:
        raise BadRequest("tool_choice must be none, auto, required or the name of a tool", "tool_choice")
    return "named", name


def _variables(given: Json) -> Json:
    reserved = {"messages", "tools", "add_generation_prompt"} & set(given)
    if reserved:
        raise BadRequest(f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}", "chat_template_kwargs")
    return given


def _message(number: int, message: object) -> Json:
    place = f"messages[{number}]"
    if not isinstance(message, dict):
        raise BadRequest(f"{place} is not an object", "messages")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRequest(f"{place}: the role must be one of {', '.join(_ROLES)}", "messages")
    plain: Json = {"role": _ROLES[role], "content": text_of(message.get("content"), place)}
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(reasoning, str):
        plain["reasoning_content"] = reasoning
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            plain[name] = message[name]
    calls = message.get("tool_calls")
    if not calls and message.get("function_call") is not None:
        calls = [{"function": message["function_call"]}]  # as calls were written before there were tools
    if calls:
        plain["tool_calls"] = [_call(call, place) for call in _listed(calls, place)]
    elif message.get("content") is None and role != "assistant":
        raise BadRequest(f"{place} has no content", "messages")
    return plain


def _listed(value: object, place: str) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise BadRequest(f"{place}: tool_calls must be a list of at most {MAX_TOOLS}", "messages")
    return value


def _call(call: object, place: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{place}: a tool call has no function with a name", "messages")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str | dict):
        raise BadRequest(f"{place}: a tool call's arguments are neither text nor an object", "messages")
    return {
        "id": str(call.get("id", ""))[:_MAX_NAME_LENGTH],
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def text_of(content: object, place: str) -> str:
    """A text, or a list of parts that are texts; anything else in it needs another kind of model."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place}: content is neither a text nor a list of parts", "messages")
    return "".join(_part(part, place) for part in content)


def _part(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRequest(f"{place}: a part of the content is not an object", "messages")
    kind = part.get("type")
    if kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind in _TEXT_PARTS or not isinstance(kind, str):
        raise BadRequest(f"{place}: a part of the content has no text", "messages")
    raise UnsupportedParameter(f"{place}: this model takes text only, not {kind[:40]!r}", "messages")
