"""vLLM's /tokenize, /detokenize and /tokenizer_info: what evaluation harnesses use instead of fetching a tokenizer from a hub."""

from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from potluck.core.errors import BadRequest
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.gateway.answering import OpenModel
from potluck.gateway.conversations import conversation
from potluck.gateway.preparing import check_length, encode_conversation
from potluck.gateway.reading import read_body, refuse
from potluck.gateway.request import Json
from potluck.gateway.responding import Service, beside_the_loop

_REFUSED: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": (), "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}  # fmt: skip


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


def described_body(kind: type[msgspec.Struct]) -> Json:
    """The body of a request for the OpenAPI description, as msgspec reads it."""
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    shown = _inlined(schema, components)
    content = {"application/json": {"schema": shown}}
    responses = {
        "4XX": {"description": "An error, with a code of the table"},
        "5XX": {"description": "An error, as above"},
    }
    return {"requestBody": {"required": True, "content": content}, "responses": responses}


def _inlined(schema: Any, components: Json) -> Any:
    if isinstance(schema, list):
        return [_inlined(part, components) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(components[schema["$ref"].rsplit("/", 1)[1]], components)
    return {key: _inlined(value, components) for key, value in schema.items()}


def add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", openapi_extra=described_body(TokenizeBody))
    async def tokenize(request: Request) -> Response:
        data = await request.body()
        body, raw = await beside_the_loop(len(data), read_body, data, TokenizeBody)
        refuse(raw, _REFUSED)
        model = await service.answering.open(body.model)
        tokens = await beside_the_loop(len(data), _tokens_of, model, body)
        strings = [model.tokenizer.spec.tokens[token] for token in tokens] if body.return_token_strs else None
        length = model.facts.context_length
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": length, "token_strs": strings})

    @app.post("/detokenize", openapi_extra=described_body(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        data = await request.body()
        body, _ = await beside_the_loop(len(data), read_body, data, DetokenizeBody)
        model = await service.answering.open(body.model)
        return _json({"prompt": await beside_the_loop(len(data), model.tokenizer.decode, body.tokens)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        model = await service.answering.open(None)
        return _json(_info(model.tokenizer.spec) | {"model_max_length": model.facts.context_length})


def _tokens_of(model: OpenModel, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (not body.messages):
        raise BadRequest("there must be either a prompt or messages", "prompt")
    if body.prompt is None:
        return encode_conversation(model, conversation(body.messages, body.tools))
    check_length(model, body.prompt, "prompt")
    return model.tokenizer.encode(body.prompt, parse_special=True, add_special=body.add_special_tokens)


def _info(spec: TokenizerSpec) -> Json:
    """In the form of Hugging Face's tokenizer_config.json, as far as clients look at it."""
    first_eos = next(iter(spec.eos_ids), None)
    return {
        "tokenizer_class": spec.algorithm,
        "bos_token": None if spec.bos_id is None else spec.tokens[spec.bos_id],
        "eos_token": None if first_eos is None else spec.tokens[first_eos],
        "unk_token": None if spec.unknown_id is None else spec.tokens[spec.unknown_id],
        "pad_token": None,
        "add_bos_token": spec.adds_bos,
        "add_eos_token": spec.adds_eos,
        "chat_template": spec.chat_template,
    }


def _json(value: Json) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
