"""A conversation as the text that its model was trained on, by the model's own template or a fallback.

Templates come with model files and are not trusted: see template_sandbox. Knows no tokens and no HTTP.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2.environment import Template

from potluck.core.errors import BadRequest, BadTemplate
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.text.fallback_templates import fallback_template
from potluck.text.template_budget import Budget, weigh
from potluck.text.template_sandbox import TemplateSandbox
from potluck.weights.tokenizer_rules import MAX_TEMPLATE_LENGTH

MAX_OUTPUT_LENGTH = 1 << 23
_MAX_ROLE_LENGTH = 64
_MAX_SHOWN = 300


class ChatTemplate:
    """One model's template, compiled once. Renderings take turns: each has the sandbox to itself."""

    def __init__(self, source: str | None, spec: TokenizerSpec, *, now: Callable[[], datetime] = datetime.now) -> None:
        """Without a source: the fallback for the vocabulary's family. Raises BadTemplate where it does not compile."""
        self.is_fallback = source is None
        text = fallback_template(spec) if source is None else source
        if len(text) > MAX_TEMPLATE_LENGTH:
            raise BadTemplate(f"the chat template is longer than {MAX_TEMPLATE_LENGTH} characters")
        self._sandbox = TemplateSandbox(now)
        self._turn = threading.Lock()
        self._variables = _special_tokens(spec)
        self._template = self._compiled(text)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        /,  # variables may have any name, `self` among them
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """The prompt. Raises BadRequest for bad messages, and BadTemplate for whatever the template does wrong."""
        checked = _checked_messages(messages)
        _check_plain("tools", tools)
        _check_plain("template variables", variables)
        values = {**self._variables, **variables}
        values |= {"messages": checked, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        values.setdefault("documents", None)
        with self._turn:
            return self._rendered(values)

    def _compiled(self, text: str) -> Template:
        try:
            return self._sandbox.compiled(text)
        except BadTemplate:
            raise
        except Exception as error:  # jinja, Python's own compiler and recursion: a stranger's code, any error is its
            _fail("cannot be compiled", error)

    def _rendered(self, values: Mapping[str, object]) -> str:
        self._sandbox.budget = Budget()
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(values):
                parts.append(part)
                length += len(part)
                if length > MAX_OUTPUT_LENGTH:
                    raise BadTemplate(f"the chat template makes more than {MAX_OUTPUT_LENGTH} characters")
        except BadTemplate:
            raise
        except Exception as error:  # as above; the sandbox cannot be left, but inside it everything may go wrong
            _fail("failed", error)
        return "".join(parts)


def _fail(what: str, error: Exception) -> NoReturn:
    line = getattr(error, "lineno", None)
    place = f" (line {line})" if isinstance(line, int) else ""
    message = str(error)[:_MAX_SHOWN] or type(error).__name__
    raise BadTemplate(f"the chat template {what}{place}: {message}") from error


def _special_tokens(spec: TokenizerSpec) -> dict[str, object]:
    ids = {"bos_token": spec.bos_id, "eos_token": next(iter(spec.eos_ids), None), "unk_token": spec.unknown_id}
    return {name: spec.tokens[token_id] if token_id is not None else "" for name, token_id in ids.items()}


def _checked_messages(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    for number, message in enumerate(messages):
        _check_message(number, message)
    _check_plain("messages", messages)
    return list(messages)


def _check_message(number: int, message: object) -> None:
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise BadRequest(f"message {number} is not an object")
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _MAX_ROLE_LENGTH:
        raise BadRequest(f"message {number} has no role")
    content = message.get("content")
    if isinstance(content, str) or (content is None and role == "assistant"):
        return
    if isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
        return
    raise BadRequest(f"message {number}: content is neither a text nor a list of parts")


def _check_plain(name: str, value: object) -> None:
    """Only what JSON has, of bounded size: nothing with methods of its own gets into the sandbox."""
    try:
        weigh(value)
    except BadTemplate:
        raise BadRequest(f"{name} must be plain JSON, of bounded size and depth") from None
