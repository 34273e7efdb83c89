"""`potluck ask` where a node of this home runs: the question goes to its swarm, over its API."""

import time
from dataclasses import dataclass, field

from potluck.cli.console import counted, harmless, notice, one_line, print_json
from potluck.cli.running import api_key, api_url, refusal, wait_until_answerable
from potluck.core.sampling_params import SamplingParams


@dataclass
class _Told:
    """What came so far, and when."""

    began_s: float
    first_s: float | None = None
    last_s: float = 0.0
    parts: list[str] = field(default_factory=list)
    reason: str | None = None


def ask_swarm(
    messages: list[dict[str, str]], model: str | None, params: SamplingParams, max_tokens: int, as_json: bool
) -> None:
    from potluck.client import ApiError, Client, Finished, ShardFailover, Text, Usage

    fields = {
        "max_tokens": max_tokens, "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k,
        "seed": params.seed,
    }  # fmt: skip
    wait_until_answerable(model)
    told, usage = _Told(time.perf_counter()), Usage(0, 0)
    try:
        with Client(api_url(), api_key(), model) as client:
            for event in client.chat(messages, **fields):
                if isinstance(event, Text):
                    _note(told, event.text, as_json)
                elif isinstance(event, ShardFailover) and not as_json:
                    notice(f"\n[{one_line(', '.join(event.lost))} lost; going on after {event.pause_ms:.0f} ms]")
                elif isinstance(event, Finished):
                    told.reason = event.reason
                elif isinstance(event, Usage):
                    usage = event
    except ApiError as error:
        raise refusal(error.status, error.code or "", f"{error.message} (`potluck status` shows the swarm)") from None
    speed = (usage.completion_tokens - 1) / max(told.last_s - (told.first_s or told.last_s), 1e-9)
    first_ms = ((told.first_s or told.last_s) - told.began_s) * 1000
    if as_json:
        return print_json(
            {
                "model": model, "text": "".join(told.parts), "finish_reason": told.reason, "prompt_tokens": usage.prompt_tokens,
                "completion_tokens": usage.completion_tokens, "first_token_ms": round(first_ms, 1),
                "tokens_per_s": round(speed, 1), "nodes": list(usage.nodes), "failovers": usage.failovers,
                "exactness": usage.exactness,
            }
        )  # fmt: skip
    print(flush=True)
    nodes = " → ".join(node[:8] for node in usage.nodes)
    exactness = "" if usage.exactness == "bitwise" else f", exactness {usage.exactness}"
    tokens = counted(usage.completion_tokens, "token")
    notice(f"[{tokens}, {speed:.0f} tokens/s, first after {first_ms:.0f} ms, over {nodes}{exactness}]")
    return None


def _note(told: _Told, text: str, as_json: bool) -> None:
    told.last_s = time.perf_counter()
    told.first_s = told.first_s or told.last_s
    told.parts.append(text)
    if not as_json:
        print(harmless(text), end="", flush=True)
