"""An error's body in the form that an address's own clients know: OpenAI's, Anthropic's or Ollama's. No I/O."""

from potluck.gateway.error_table import message_of, openai_error, row_of
from potluck.gateway.request import Json

_ANTHROPIC_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error_body(error: Exception, path: str) -> Json:
    if path.startswith("/v1/messages"):
        return anthropic_error(error)
    if path.startswith("/api/"):
        return ollama_error(error)
    return openai_error(error)


def anthropic_error(error: Exception) -> Json:
    row = row_of(error)
    usual = "invalid_request_error" if row.status < 500 else "api_error"
    shown = {"type": _ANTHROPIC_TYPES.get(row.status, usual), "message": message_of(error), "code": row.code}
    return {"type": "error", "error": shown}


def ollama_error(error: Exception) -> Json:
    return {"error": message_of(error)}
