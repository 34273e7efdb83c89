"""The one internal request that every API surface is translated to. Pure data; knows no HTTP and no surface."""

import hashlib
from typing import Any, Literal

import msgspec

from potluck.core.grammar import Grammar
from potluck.core.sampling_params import SamplingParams

ToolChoice = Literal["none", "auto", "required", "named"]
Json = dict[str, Any]


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call. `parameters` is its JSON schema."""

    name: str
    description: str = ""
    parameters: Json = {}

    def described(self) -> Json:
        """As chat templates expect it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """Messages in OpenAI's form, contents as texts."""

    messages: tuple[Json, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    named_tool: str | None = None
    allows_parallel_calls: bool = True
    template_variables: Json = {}
    begun_answer: str = ""  # what the model is to go on from, as if it had written it


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of `conversation` and `prompts` is there; `n` choices are made for each prompt."""

    model: str | None
    conversation: Conversation | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    params: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    n: int = 1
    stops: tuple[str, ...] = ()
    grammar: Grammar | None = None
    wants_logprobs: bool = False
    echoes_prompt: bool = False

    @property
    def choice_count(self) -> int:
        return self.n * (1 if self.conversation is not None else len(self.prompts))

    def digest(self) -> bytes:
        """The same for all requests that want the same, but for the seed, which may have been drawn, and the model's many names."""
        params = msgspec.structs.replace(self.params, seed=0)
        wanted = msgspec.structs.replace(self, params=params, model=None)
        plain = msgspec.to_builtins(wanted, str_keys=True)
        return hashlib.sha256(msgspec.json.encode(plain, order="deterministic")).digest()
