"""All addresses of the API, each a thin translation. Bodies are read by msgspec; FastAPI routes and describes them."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from potluck.core.errors import BadRequest, MethodNotAllowed, PotluckError, RouteNotFound
from potluck.gateway import anthropic_messages, ollama, openai_chat, openai_completions, openai_responses
from potluck.gateway.answering import ModelCard
from potluck.gateway.error_forms import error_body
from potluck.gateway.guarding import Guard, GuardSettings
from potluck.gateway.not_offered import add_not_offered_routes
from potluck.gateway.preparing import encode_conversation
from potluck.gateway.reading import read_body
from potluck.gateway.request import InferenceRequest, Json
from potluck.gateway.responding import (
    Caller,
    DiagnosticsMode,
    GenerationResponse,
    Service,
    ServiceSettings,
    beside_the_loop,
    send_error,
)
from potluck.gateway.resuming import LAST_EVENT_ID, resumable
from potluck.gateway.surface import Surface
from potluck.gateway.tokenizing import add_tokenizer_routes, described_body

DIAGNOSTICS_HEADER = "x-potluck-diagnostics"
Reader = Callable[[bytes, int], tuple[InferenceRequest | None, Surface]]


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class ErrorResponse(Response):
    """Status and Retry-After by the table; the body in the form that the address's own clients know."""

    def __init__(self, error: Exception, path: str) -> None:
        self._error, self._path = error, path
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, self._error, error_body(self._error, self._path))


def build_app(service: Service, guard: GuardSettings, extend: Callable[[FastAPI], None] | None = None) -> ASGIApp:
    """The whole API behind its guard. `extend` may add further routes (the page's)."""
    app = FastAPI(
        title="Potluck", version="1", docs_url=None, redoc_url=None, openapi_url="/openapi.json",
        default_response_class=JsonResponse, redirect_slashes=False,
    )  # fmt: skip
    app.add_exception_handler(PotluckError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    if extend is not None:
        extend(app)
    others = list(app.routes)
    _add_generating_routes(app, service)
    _add_model_routes(app, service)
    _add_ollama_routes(app, service)
    add_tokenizer_routes(app, service)
    _add_state_routes(app, service)
    _add_head_routes(app, [route for route in app.routes if route not in others])
    add_not_offered_routes(app)
    return Guard(app, guard)


async def _on_error(request: Request, error: Exception) -> Response:
    return ErrorResponse(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    shown: PotluckError = RouteNotFound(
        "there is no such address; OpenAI's and Anthropic's are under /v1, Ollama's under /api"
    )
    if status == 405:
        allowed = ((error.headers if isinstance(error, HTTPException) else None) or {}).get("Allow", "")
        shown = MethodNotAllowed(f"this address knows {allowed or 'other methods'} only", allowed)
    elif status != 404:
        shown = BadRequest("the request cannot be read")
    return ErrorResponse(shown, request.url.path)


def caller_of(request: Request) -> Caller:
    """Who the guard found; and whether the stream is to carry what happens to the shards."""
    mode = request.headers.get(DIAGNOSTICS_HEADER, "off")
    modes: dict[str, DiagnosticsMode] = {"off": "off", "events": "events", "comments": "comments"}
    if mode not in modes:
        raise BadRequest(f"{DIAGNOSTICS_HEADER} must be events, comments or off")
    return Caller(request.state.potluck_client, request.state.potluck_tier, modes[mode])


# ------------------------------------------------------------ answering


def _add_generating_routes(app: FastAPI, service: Service) -> None:
    readers: tuple[tuple[str, Reader, type[msgspec.Struct]], ...] = (
        ("/v1/chat/completions", openai_chat.read_chat, openai_chat.ChatBody),
        ("/v1/completions", openai_completions.read_completion, openai_completions.CompletionBody),
        ("/v1/responses", openai_responses.read_responses, openai_responses.ResponsesBody),
        ("/v1/messages", anthropic_messages.read_messages, anthropic_messages.MessagesBody),
        ("/api/chat", ollama.read_ollama_chat, ollama.OllamaChatBody),
        ("/api/generate", ollama.read_ollama_generate, ollama.OllamaGenerateBody),
    )
    for path, reader, body in readers:
        app.add_api_route(path, _generating(service, reader), methods=["POST"], openapi_extra=described_body(body))

    @app.post("/v1/messages/count_tokens", openapi_extra=described_body(anthropic_messages.CountBody))
    async def count_tokens(request: Request) -> Response:
        data = await request.body()
        name, conversation = await beside_the_loop(len(data), anthropic_messages.read_count, data)
        model = await service.answering.open(name)
        tokens = await beside_the_loop(len(data), encode_conversation, model, conversation)
        return JsonResponse({"input_tokens": len(tokens)})


def _generating(service: Service, read: Reader) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        data = await request.body()
        wanted, surface = await beside_the_loop(len(data), read, data, int(time.time()))
        if wanted is None:
            assert isinstance(surface, ollama.OllamaSurface)
            await service.answering.open(ollama.model_name(surface.model))
            return JsonResponse(surface.loaded())
        answer = resumable(wanted, surface, request.headers.get(LAST_EVENT_ID))
        return GenerationResponse(service, wanted, surface, len(data), caller_of(request), answer)

    return answer


# ------------------------------------------------------------ models


def _shown_model(card: ModelCard) -> Json:
    return {
        "id": card.id, "object": "model", "created": card.created, "owned_by": "potluck", "context_length": card.context_length,
        "type": "model", "display_name": card.id, "created_at": ollama.timestamp(card.created),  # as Anthropic's SDK has them
        "max_model_len": card.context_length, "capabilities": ["completion", "chat", "tools"],
        "meta": {"architecture": card.architecture, "weights_sha256": card.weights_sha256},
    }  # fmt: skip


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        data = [_shown_model(card) for card in await service.answering.models()]
        ids = [model["id"] for model in data] or [None]
        return JsonResponse({"object": "list", "data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]})

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        return JsonResponse(_shown_model((await service.answering.open(model_id)).card))


def _add_ollama_routes(app: FastAPI, service: Service) -> None:
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root() -> Response:
        return PlainTextResponse(ollama.SIGN_OF_LIFE)

    @app.get("/api/version")
    async def version() -> Response:
        return JsonResponse({"version": ollama.VERSION})

    @app.get("/api/tags")
    async def tags() -> Response:
        return JsonResponse({"models": [ollama.tag_of(card) for card in await service.answering.models()]})

    @app.get("/api/ps")
    async def running() -> Response:
        return JsonResponse({"models": [ollama.running_of(card) for card in await service.answering.models()]})

    @app.post("/api/show", openapi_extra=described_body(ollama.NameBody))
    async def show(request: Request) -> Response:
        body, _ = read_body(await request.body(), ollama.NameBody)
        return JsonResponse(ollama.shown_of(await service.answering.open(ollama.model_name(body.model or body.name))))


def _add_head_routes(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Watchdogs, and Ollama's own clients, ask with HEAD whether somebody is there; FastAPI does not add it to a GET by itself."""
    for route in routes:
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


# ------------------------------------------------------------ state


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        return JsonResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        page = service.answering.metrics_page() + service.figures.page()
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


__all__ = ["DIAGNOSTICS_HEADER", "ServiceSettings", "build_app"]
