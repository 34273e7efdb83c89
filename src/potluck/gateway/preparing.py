"""From the internal request to generations: template, tokens, limits, grammar, one generation per choice. No I/O."""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from potluck.core.errors import BadRequest, ContextLengthExceeded
from potluck.core.grammar import Grammar
from potluck.gateway.answering import OpenModel
from potluck.gateway.choice import CallReader, ChoiceSettings, NamedCallReader, new_call_id
from potluck.gateway.pipeline_features import with_grammar, with_prompt_logprobs, without_beginning
from potluck.gateway.request import Conversation, InferenceRequest, Json, Tool
from potluck.orchestrator.generation import GenerationRequest
from potluck.text.tool_calls import ToolCallParser
from potluck.text.tool_prompt import render_conversation

_SHRINKING = 2  # by how much normalisation and stripped blanks may make a text shorter than it came


class PreparedChoice(msgspec.Struct, frozen=True):
    index: int
    request: GenerationRequest
    settings: ChoiceSettings
    echoed: str  # text of the prompt, where it is to be shown before the answer
    new_call_id: Callable[[], str] = new_call_id
    remembered: tuple[int, ...] = ()  # of an answer that is taken up: what was chosen, and must be again
    must_be_bitwise: bool = False  # … where nobody remembers: everything is, by those who choose the same

    def owned_by(self, client: str) -> "PreparedChoice":
        return msgspec.structs.replace(self, request=msgspec.structs.replace(self.request, owner=client))


class Prepared(NamedTuple):
    choices: tuple[PreparedChoice, ...]
    prompt_tokens: int
    digest: bytes = b""  # of what was asked for

    def owned_by(self, client: str) -> "Prepared":
        """What shards keep of these is for the same client's next request."""
        return self._replace(choices=tuple(choice.owned_by(client) for choice in self.choices))


def encode_conversation(model: OpenModel, conversation: Conversation) -> list[int]:
    """The prompt's tokens, tools included. Raises ContextLengthExceeded for what is far too long to look at."""
    text = _rendered(model, conversation)
    check_length(model, text, "messages")
    return model.tokenizer.encode_prompt(text)


def _rendered(model: OpenModel, conversation: Conversation) -> str:
    tools = [tool.described() for tool in shown_tools(conversation)]
    source = model.tokenizer.spec.chat_template
    text = render_conversation(model.template, source, conversation.messages, tools, conversation.template_variables)
    return text + conversation.begun_answer


def shown_tools(conversation: Conversation) -> tuple[Tool, ...]:
    """With `none` the model is not told of any; with a name, of that one only."""
    if conversation.tool_choice == "none":
        return ()
    if conversation.tool_choice == "named":
        return tuple(tool for tool in conversation.tools if tool.name == conversation.named_tool)
    return conversation.tools


def prepare(model: OpenModel, request: InferenceRequest, default_max_tokens: int) -> Prepared:
    """Raises BadRequest (context_length_exceeded among it) with whatever cannot be, before anything is started."""
    if request.conversation is not None:
        prompts = [encode_conversation(model, request.conversation)]
    else:
        prompts = [_tokens_of(model, prompt) for prompt in request.prompts]
    choices: list[PreparedChoice] = []
    for number, prompt in enumerate(prompts):
        choices += _choices(model, request, prompt, number * request.n, default_max_tokens)
    return Prepared(tuple(choices), sum(map(len, prompts)), request.digest())


def _choices(
    model: OpenModel, request: InferenceRequest, prompt: list[int], first: int, default_max_tokens: int
) -> list[PreparedChoice]:
    if not prompt:
        raise BadRequest("the prompt is empty", "prompt")
    generation = _generation(model, request, prompt, default_max_tokens)
    echoed = model.tokenizer.decode(without_beginning(prompt, model.tokenizer)) if request.echoes_prompt else ""
    return [
        PreparedChoice(
            first + n, msgspec.structs.replace(generation, choice=n), _choice_settings(request, len(echoed)), echoed
        )
        for n in range(request.n)
    ]


def _generation(
    model: OpenModel, request: InferenceRequest, prompt: list[int], default_max_tokens: int
) -> GenerationRequest:
    max_tokens = default_max_tokens if request.max_tokens is None else request.max_tokens
    _check_biased_tokens(request, model.facts.vocabulary_size)
    try:
        generation = model.request(prompt, request.params, max_tokens)
    except ContextLengthExceeded as error:
        error.param = "messages" if request.conversation is not None else "prompt"
        raise
    grammar = request.grammar or _tool_grammar(request.conversation)
    if grammar is not None:
        generation = with_grammar(generation, grammar)
    if request.echoes_prompt and request.wants_logprobs:
        generation = with_prompt_logprobs(generation, request.params.logprobs or 0)
    return generation


def _check_biased_tokens(request: InferenceRequest, vocabulary_size: int) -> None:
    """The sampling shard would refuse such a token too, but as a shard's fault, and the next one would be asked."""
    beyond = [token for token in request.params.logit_bias if token >= vocabulary_size]
    if beyond:
        raise BadRequest(f"logit_bias names token {beyond[0]}; the vocabulary has {vocabulary_size}", "logit_bias")


def check_length(model: OpenModel, text: str, param: str) -> None:
    """Megabytes that cannot fit whatever their tokens are, are not tokenized first: that takes some seconds for each."""
    most = model.facts.context_length * model.tokenizer.longest_token * _SHRINKING
    if len(text) > most:
        raise ContextLengthExceeded(
            f"the prompt has {len(text)} characters; {model.facts.context_length} tokens hold far fewer", param
        )


def _tokens_of(model: OpenModel, prompt: str | tuple[int, ...]) -> list[int]:
    if isinstance(prompt, str):
        check_length(model, prompt, "prompt")
        return model.tokenizer.encode(prompt, parse_special=False)
    size = min(model.facts.vocabulary_size, model.tokenizer.vocabulary_size)
    if any(not 0 <= token < size for token in prompt):
        raise BadRequest(f"a token id of the prompt is outside the vocabulary of {size}", "prompt")
    return list(prompt)


def _choice_settings(request: InferenceRequest, echoed_length: int) -> ChoiceSettings:
    conversation = request.conversation
    return ChoiceSettings(
        stops=request.stops,
        calls=_call_reader(conversation),
        wants_logprobs=request.wants_logprobs,
        continues_text=conversation is None or bool(conversation.begun_answer),
        first_only=conversation is not None and not conversation.allows_parallel_calls,
        echoed_length=echoed_length,
    )


def _call_reader(conversation: Conversation | None) -> CallReader | None:
    if conversation is None or not shown_tools(conversation):
        return None
    single = _forced_tool(conversation)
    if single is not None:
        return NamedCallReader(single.name)
    return ToolCallParser([tool.name for tool in conversation.tools])


def _forced_tool(conversation: Conversation) -> Tool | None:
    """The one tool that must be called."""
    tools = shown_tools(conversation)
    return tools[0] if conversation.tool_choice in ("named", "required") and len(tools) == 1 else None


def _tool_grammar(conversation: Conversation | None) -> Grammar | None:
    """A call that must be made is made by grammar: the arguments of the tool, or an object that names one of them."""
    if conversation is None or conversation.tool_choice not in ("named", "required"):
        return None
    single = _forced_tool(conversation)
    if single is not None:
        schema = _parameters(single)
    else:
        schema = {"anyOf": [_call_schema(number, tool) for number, tool in enumerate(conversation.tools)]}
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _call_schema(number: int, tool: Tool) -> Json:
    """The parameters are a document of their own in it, so that `#` in their references goes on meaning them.

    Without their `$schema`: before 2019 `$id` had another name, or none beside a `$ref`.
    """
    parameters = {key: value for key, value in _parameters(tool).items() if key != "$schema"}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": parameters | {"$id": f"tool://{number}/"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(tool: Tool) -> Json:
    return tool.parameters or {"type": "object", "additionalProperties": False}
