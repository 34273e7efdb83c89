"""Ollama's API: newline-delimited JSON, streaming unless told otherwise, sampling fields in `options`, durations in nanoseconds."""

import secrets
from datetime import UTC, datetime
from typing import Any

import msgspec

from potluck.core.errors import BadRequest
from potluck.core.grammar import Grammar
from potluck.gateway.answering import ModelCard, OpenModel
from potluck.gateway.conversations import check_together, conversation
from potluck.gateway.error_forms import ollama_error
from potluck.gateway.events import ChoiceFinished, Event, TextDelta, ToolCallArguments, ToolCallStarted, Usage
from potluck.gateway.reading import checked_limit, converted, read_body, refuse, sampling_params, stop_strings
from potluck.gateway.request import InferenceRequest, Json
from potluck.gateway.surface import NDJSON, CollectedCall, CollectedChoice, ndjson, potluck_usage

SIGN_OF_LIFE = "Ollama is running"  # clients compare it
VERSION = "0.12.0"  # of the API that is spoken; clients look at it to learn what they may send
_NO_SEED = -1  # Ollama's word for one that is drawn
_DEFAULTS = {"top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1}
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty")
_REFUSED_OPTIONS: dict[str, tuple[object, ...]] = {
    "mirostat": (0,), "tfs_z": (1, 1.0), "typical_p": (1, 1.0), "repeat_last_n": (64, -1),
}  # fmt: skip
_REFUSED: dict[str, tuple[object, ...]] = {
    "images": ([],), "suffix": ("",), "template": ("",), "context": ([],), "think": (False,), "logprobs": (False,),
    "top_logprobs": (0,),
}  # fmt: skip


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str = ""
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] = {}


class OllamaChatBody(_Common, frozen=True, kw_only=True):
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []


class OllamaGenerateBody(_Common, frozen=True, kw_only=True):
    prompt: str = ""
    system: str | None = None
    raw: bool = False


class NameBody(msgspec.Struct, frozen=True):
    model: str = ""
    name: str = ""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.9
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.1
    num_predict: int = -1
    stop: str | list[str] = []


def read_ollama_chat(data: bytes, created: int) -> tuple[InferenceRequest | None, "OllamaSurface"]:
    """No request where there are no messages: then a client only wants the model to be there."""
    body, raw = read_body(data, OllamaChatBody)
    refuse(raw, _REFUSED)
    surface = OllamaSurface(body.model, created, body.stream, is_chat=True)
    if not body.messages:
        return None, surface
    messages = [_message(message) for message in body.messages]
    return _request(body, conversation_of=(messages, body.tools)), surface


def read_ollama_generate(data: bytes, created: int) -> tuple[InferenceRequest | None, "OllamaSurface"]:
    body, raw = read_body(data, OllamaGenerateBody)
    refuse(raw, _REFUSED)
    surface = OllamaSurface(body.model, created, body.stream, is_chat=False)
    if not body.prompt:
        return None, surface
    if body.raw:
        return _request(body, prompt=body.prompt), surface
    messages = [{"role": "system", "content": body.system}] if body.system else []
    return _request(body, conversation_of=([*messages, {"role": "user", "content": body.prompt}], [])), surface


def _request(
    body: _Common, *, conversation_of: tuple[list[Json], list[Json]] | None = None, prompt: str | None = None
) -> InferenceRequest:
    refuse(body.options, _REFUSED_OPTIONS)
    options = converted({k: v for k, v in body.options.items() if v is not None}, Options)
    values = {name: value for name in _OPTIONS if (value := getattr(options, name)) is not None}
    if options.seed == _NO_SEED:
        del values["seed"]
    params = sampling_params(
        values | {"repetition_penalty": options.repeat_penalty}, temperature=0.8, defaults=_DEFAULTS
    )
    limit = None if options.num_predict <= 0 else checked_limit(options.num_predict, "num_predict")
    held, grammar = None if conversation_of is None else conversation(*conversation_of), _grammar(body.format)
    if held is not None:
        check_together(grammar, held)
    return InferenceRequest(
        model=model_name(body.model),
        conversation=held,
        prompts=() if prompt is None else (prompt,),
        params=params,
        max_tokens=limit,
        stops=stop_strings(options.stop),
        grammar=grammar,
    )


def model_name(name: str) -> str | None:
    """Ollama's clients put a tag after a name that has none."""
    return name.removesuffix(":latest") or None


def _grammar(given: str | Json | None) -> Grammar | None:
    if given in (None, ""):
        return None
    if given == "json":
        return Grammar("json_object")
    if isinstance(given, dict):
        return Grammar("json_schema", msgspec.json.encode(given).decode())
    raise BadRequest("format must be json or a schema", "format")


def _message(message: Json) -> Json:
    """Ollama's calls have their arguments as objects and no ids, and results name the tool."""
    refuse(message, {"images": ([], None)})
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return {**message, "content": message.get("content") or ""}
    return {
        **message,
        "tool_calls": [{"type": "function", **call} if isinstance(call, dict) else call for call in calls],
    }


class OllamaSurface:
    media_type = NDJSON

    def __init__(self, model: str, created: int, is_streaming: bool, is_chat: bool) -> None:
        self.model, self.is_streaming = model, is_streaming
        self.request_id = f"ollama-{secrets.token_hex(8)}"
        self._is_chat, self._created = is_chat, created
        self._calls: list[CollectedCall] = []
        self._reason = "stop"

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def event(self, event: Event) -> bytes:
        if isinstance(event, TextDelta):
            return ndjson(self._envelope(event.text, [], is_done=False)) if event.text else b""
        if isinstance(event, ToolCallStarted):
            self._calls.append(CollectedCall(event.call_id, event.name))
        elif isinstance(event, ToolCallArguments):
            self._calls[-1].arguments += event.text
        elif isinstance(event, ChoiceFinished):
            self._reason = "length" if event.reason == "length" else "stop"
            if self._calls:
                return ndjson(self._envelope("", self._calls, is_done=False))
        return b""

    def end(self, usage: Usage) -> bytes:
        return ndjson(self._envelope("", [], is_done=True) | self._figures(usage))

    def failure(self, error: Exception) -> bytes:
        return ndjson(self.error_body(error))

    def keep_alive(self) -> bytes:
        return b""  # there is nothing in this format that clients would skip

    def body(self, choices: list[CollectedChoice], usage: Usage) -> Json:
        [choice] = choices
        self._reason = "length" if choice.reason == "length" else "stop"
        return self._envelope(choice.text, choice.calls, is_done=True) | self._figures(usage)

    def loaded(self) -> Json:
        """The answer to a request without a question."""
        return self._envelope("", [], is_done=True) | {"done_reason": "load"}

    def error_body(self, error: Exception) -> Json:
        return ollama_error(error)

    def _envelope(self, text: str, calls: list[CollectedCall], is_done: bool) -> Json:
        shown: Json = {"model": self.model, "created_at": timestamp(self._created), "done": is_done}
        if not self._is_chat:
            return shown | {"response": text}
        message: Json = {"role": "assistant", "content": text}
        shown_calls = [
            {"function": {"name": call.name, "arguments": arguments}}
            for call in calls
            if (arguments := _arguments(call.arguments)) is not None
        ]
        if shown_calls:
            message["tool_calls"] = shown_calls
        return shown | {"message": message}

    def _figures(self, usage: Usage) -> Json:
        first_ns, total_ns = round(usage.first_token_s * 1e9), round(usage.total_s * 1e9)
        return {
            "done_reason": self._reason, "total_duration": total_ns, "load_duration": 0, "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first_ns, "eval_count": usage.completion_tokens, "eval_duration": max(total_ns - first_ns, 0),
            "potluck": potluck_usage(usage),
        }  # fmt: skip


def _arguments(text: str) -> Json | None:
    """None of a call that was cut short: these clients run whatever they are shown."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def timestamp(created: int) -> str:
    return datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")


def tag_of(card: ModelCard) -> Json:
    return {
        "name": card.id, "model": card.id, "modified_at": timestamp(card.created), "size": 0, "digest": card.weights_sha256,
        "details": _details(card),
    }  # fmt: skip


def running_of(card: ModelCard) -> Json:
    return tag_of(card) | {
        "expires_at": "9999-12-31T23:59:59Z",
        "size_vram": 0,
        "context_length": card.context_length or 0,
    }


def shown_of(model: OpenModel) -> Json:
    """`/api/show`: editors learn the context and the abilities from here."""
    card, facts = model.card, model.facts
    kind = facts.architecture
    return {
        "modelfile": "", "parameters": "", "license": "", "template": model.tokenizer.spec.chat_template or "",
        "modified_at": timestamp(card.created), "details": _details(card), "capabilities": ["completion", "tools"],
        "model_info": {
            "general.architecture": kind, "general.basename": card.id, f"{kind}.context_length": facts.context_length,
            f"{kind}.block_count": facts.layer_count, f"{kind}.embedding_length": facts.hidden_size,
            f"{kind}.attention.head_count": facts.head_count, f"{kind}.attention.head_count_kv": facts.kv_head_count,
            f"{kind}.vocab_size": facts.vocabulary_size,
        },
    }  # fmt: skip


def _details(card: ModelCard) -> Json:
    return {
        "parent_model": "", "format": "gguf", "family": card.architecture, "families": [card.architecture], "parameter_size": "",
        "quantization_level": "",
    }  # fmt: skip
