"""The one table from our error codes to what HTTP clients get. `docs/errors.md` is made from it. No I/O.

HearthNet §6's codes are `experimental_disabled`, `shard_unavailable`, `pipeline_stalled`, `weights_mismatch` and `bad_request`.
"""

from typing import NamedTuple

from potluck.core.errors import GenerationAborted, PotluckError, QueueFull

_CLIENT, _SERVER, _BUSY = "invalid_request_error", "server_error", "overloaded_error"


class Row(NamedTuple):
    """`retry_after_s`: the least that the header says; None: trying again will not help."""

    code: str
    status: int
    type: str
    meaning: str
    retry_after_s: int | None = None


_ROWS = (
    Row("bad_request", 400, _CLIENT, "The request is malformed, or asks for what cannot be."),
    Row("context_length_exceeded", 400, _CLIENT, "The prompt leaves no room in the model's context. Nothing is cut silently."),
    Row("unsupported_parameter", 400, _CLIENT, "A field would change the output and cannot be honoured here."),
    Row("bad_grammar", 400, _CLIENT, "A schema, expression or grammar that no answer can be held to."),
    Row("bad_template", 400, _CLIENT, "The model's chat template refuses these messages, or fails on them."),
    Row("invalid_api_key", 401, "authentication_error", "The key is missing or wrong."),
    Row("access_denied", 403, "permission_error", "Whoever asks may not."),
    Row("forbidden_host", 403, "permission_error", "The Host header names a host that this server is not (DNS rebinding)."),
    Row("forbidden_origin", 403, "permission_error", "A page of another site asks; `--allow-origin` names those that may."),
    Row("model_not_found", 404, "not_found_error", "No node on offer serves a model of that name."),
    Row("not_found", 404, "not_found_error", "There is no such address."),
    Row("method_not_allowed", 405, _CLIENT, "The address exists, but not with this method."),
    Row("request_timeout", 408, _CLIENT, "The request's body did not arrive in time."),
    Row("resume_impossible", 409, _CLIENT, "An answer that cannot be taken up where it broke off; the message says why. Ask anew."),
    Row("request_too_large", 413, _CLIENT, "The request's body is over the limit."),
    Row("queue_full", 429, "rate_limit_error", "As many requests wait as may. Try again later.", 1),
    Row("not_offered", 501, _SERVER, "Other servers have this address, this one does not (embeddings, images, pulling models)."),
    Row("internal_error", 500, _SERVER, "A fault of ours; the log has it."),
    Row("bad_model_file", 500, _SERVER, "A model file lies or is cut short."),
    Row("unknown_architecture", 500, _SERVER, "A model of a kind that we cannot run."),
    Row("unknown_format", 500, _SERVER, "A tensor format that we cannot compute with."),
    Row("download_failed", 502, _SERVER, "A model could not be fetched."),
    Row("bad_key_file", 500, _SERVER, "This node's key file cannot be read, or others can read it too."),
    Row("wire_error", 502, _SERVER, "Nodes do not understand each other."),
    Row("protocol_violation", 502, _SERVER, "A node sent what the protocol does not allow."),
    Row("wire_misuse", 500, _SERVER, "A fault of ours in what was to be sent."),
    Row("wrong_peer", 502, _SERVER, "Somebody else answers at a node's address."),
    Row("peer_refused", 502, _SERVER, "A node turned us away."),
    Row("shard_corruption", 502, _SERVER, "A shard sent what no sound machine sends (in `shard_status`; an answer ends otherwise).", 5),
    Row("weights_mismatch", 503, _SERVER, "The nodes on offer hold other weights under that name.", 10),
    Row("experimental_disabled", 503, _SERVER, "The node was told not to take part (`enabled = false` in its configuration).", 60),
    Row("shard_unavailable", 503, _BUSY, "No shard covers some layers, or all that do are full.", 2),
    Row("node_stopping", 503, _BUSY, "The node that was asked is being ended. Any other member can go on with the answer.", 2),
    Row("kv_budget_exceeded", 503, _BUSY, "The shards have no memory left for so long a context now.", 5),
    Row("overloaded", 503, _BUSY, "A turn did not come in time, or memory for requests is used up.", 2),
    Row("link_error", 503, _SERVER, "The way to a node is broken.", 2),
    Row("link_closed", 503, _SERVER, "The way to a node is closed.", 2),
    Row("link_full", 503, _BUSY, "A node does not take what is sent to it.", 2),
    Row("dial_failed", 503, _SERVER, "A node does not answer.", 2),
    Row("benchmark_failed", 500, _SERVER, "A benchmark cannot run here."),
    Row("bad_invite", 400, _CLIENT, "An invite that was altered, cut short, or is none."),
    Row("not_entitled", 403, "permission_error", "This node may not do that in its swarm."),
    Row("bad_swarm_file", 500, _SERVER, "The file of this node's swarm is damaged, in use, or open to others."),
    Row("record_refused", 502, _SERVER, "A membership record or an advert that counts for nothing."),
    Row("weights_missing", 503, _SERVER, "Some layers' weights are not on the machine that should serve them.", 10),
    Row("weights_unavailable", 503, _SERVER, "No peer gives some layers' weights.", 10),
    Row("placement_impossible", 503, _SERVER, "The machines together cannot hold the model; the message says what is missing.", 30),
    Row("device_unavailable", 500, _SERVER, "The device that was asked for is not there, or cannot be used."),
    Row("out_of_device_memory", 503, _BUSY, "The device has no room for the layers or their KV.", 10),
    Row("pipeline_stalled", 504, _SERVER, "No progress within the time allowed.", 5),
)  # fmt: skip
TABLE = {row.code: row for row in _ROWS}


def row_of(error: BaseException) -> Row:
    """What a client gets for an error; a fault without a code of ours is internal."""
    code = error.code if isinstance(error, PotluckError) else "internal_error"
    row = TABLE.get(code, TABLE["internal_error"])
    if isinstance(error, QueueFull):
        row = row._replace(retry_after_s=max(error.retry_after_s, row.retry_after_s or 1))
    return row


def message_of(error: BaseException) -> str:
    """The text for clients; of faults that are not ours to tell nothing is shown."""
    return str(error) if isinstance(error, PotluckError) else "something went wrong inside; the server's log says what"


def openai_error(error: BaseException) -> dict[str, object]:
    row = row_of(error)
    code = error.code if isinstance(error, PotluckError) else row.code
    shown: dict[str, object] = {
        "message": message_of(error),
        "type": row.type,
        "param": getattr(error, "param", None),
        "code": code,
    }
    if isinstance(error, GenerationAborted) and error.resume is not None:
        shown["resume"] = error.resume
    return {"error": shown}


def rendered_table() -> str:
    """`docs/errors.md`."""
    lines = [
        "# Errors of the HTTP API",
        "",
        "<!-- made by potluck.gateway.error_table.rendered_table; a test compares -->",
        "",
        'Errors come as `{"error": {"message", "type", "param", "code"}}` (Anthropic\'s and Ollama\'s addresses use their own forms with',
        "the same statuses). Once a stream has begun, the same object is sent as an event. Codes are stable; messages are for people.",
        "",
        "| code | HTTP | type | Retry-After | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in sorted(_ROWS, key=lambda row: (row.status, row.code)):
        wait = "" if row.retry_after_s is None else f"≥ {row.retry_after_s} s"
        lines.append(f"| `{row.code}` | {row.status} | `{row.type}` | {wait} | {row.meaning} |")
    return "\n".join(lines) + "\n"
