"""Addresses that clients know from other servers and that are not here: a sentence that says why, instead of a bare 404."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from starlette.responses import Response

from potluck.core.errors import NotOffered

_EMBEDDINGS = "a chat model's hidden states make no useful embeddings, so there are none here; use a server with an embedding model"
_MODELS = "models are not pulled, made or deleted through the API; type: potluck pull MODEL, potluck remove MODEL"
_STATELESS = "answers are not stored here; send the whole conversation with each request"
_MEDIA = "this server makes text only"
_SENTENCES = {
    "/v1/embeddings": _EMBEDDINGS, "/api/embed": _EMBEDDINGS, "/api/embeddings": _EMBEDDINGS, "/v1/rerank": _EMBEDDINGS,
    "/api/pull": _MODELS, "/api/push": _MODELS, "/api/create": _MODELS, "/api/copy": _MODELS, "/api/delete": _MODELS,
    "/v1/responses/{name:path}": _STATELESS, "/v1/conversations": _STATELESS, "/v1/threads": _STATELESS,
    "/v1/assistants": _STATELESS, "/v1/files": _STATELESS, "/v1/batches": _STATELESS,
    "/v1/images/{name:path}": _MEDIA, "/v1/audio/{name:path}": _MEDIA, "/v1/videos": _MEDIA,
    "/v1/moderations": "there is no moderation model here",
}  # fmt: skip


def add_not_offered_routes(app: FastAPI) -> None:
    for path, sentence in _SENTENCES.items():
        app.add_route(path, _refusing(sentence), methods=["GET", "POST", "DELETE"], include_in_schema=False)


def _refusing(sentence: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        raise NotOffered(sentence)

    return refuse
