"""`potluck ask` where a node of this home runs: the question goes to its swarm, over its API."""

import time
from typing import TYPE_CHECKING

from potluck.cli.chat import AnswerStream, figures_line
from potluck.cli.console import notice, print_json
from potluck.cli.running import NodeWentAway, api_key, api_url, refusal, wait_until_answerable
from potluck.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from potluck.cli.chat_session import AnswerFigures


def ask_swarm(
    messages: list[dict[str, str]], model: str | None, params: SamplingParams, max_tokens: int, as_json: bool
) -> None:
    import httpx

    from potluck.client import ApiError, Client, Finished, Usage

    fields = {
        "max_tokens": max_tokens, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k,
        "seed": params.seed,
    }  # fmt: skip
    wait_until_answerable(model)
    stream, reason, answered_by = AnswerStream(as_json), None, model
    try:
        with Client(api_url(), api_key(), model) as client:
            for event in client.chat(messages, **fields):
                stream.take(event, time.monotonic())
                reason = event.reason if isinstance(event, Finished) else reason
                answered_by = event.model if isinstance(event, Usage) else answered_by
        if reason is None:
            raise httpx.RemoteProtocolError("the stream ended early")
    except httpx.HTTPError as error:
        if stream.text and not as_json:
            print(flush=True)  # the complaint begins on a line of its own
        raise NodeWentAway(
            f"the node went away in the middle of the answer ({error}); `potluck up` starts it again, then ask anew"
        ) from None
    except ApiError as error:
        raise refusal(error.status, error.code or "", f"{error.message} (`potluck status` shows the swarm)") from None
    if as_json:
        return print_json(
            {"model": answered_by, "text": stream.text, "finish_reason": reason, **_report(stream.figures())}
        )
    print(flush=True)
    return notice(figures_line(stream.figures()))


def _report(figures: "AnswerFigures") -> dict[str, object]:
    return {
        "prompt_tokens": figures.prompt_tokens, "completion_tokens": figures.completion_tokens,
        "first_token_ms": round(figures.first_token_s * 1000, 1), "tokens_per_s": round(figures.tokens_per_s, 1),
        "nodes": list(figures.nodes), "failovers": figures.failovers, "exactness": figures.exactness,
    }  # fmt: skip
