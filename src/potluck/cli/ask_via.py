"""`potluck ask --via`: the question goes over shards on other machines; prints text as it comes, and what happened to the shards."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.cli.console import notice, print_json
from potluck.core.errors import BadRequest, PipelineStalled, PotluckError, ShardUnavailable
from potluck.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from potluck.node.asking import RemoteModel
    from potluck.orchestrator.request import GenerationSettings
    from potluck.wire.messages import Stage

CODECS = ("fp32", "fp16", "int8")


@dataclass(frozen=True)
class RemoteQuestion:
    addresses: list[str]
    model: str | None
    messages: list[dict[str, str]]
    params: SamplingParams
    max_tokens: int
    uses_ring: bool
    codec: str | None
    as_json: bool
    own_layers: str | None = None  # `0-4,25-output`: what this machine computes itself
    threads: int | None = None
    prefill_chunk: int | None = None
    prefill_window: int | None = None

    def generation_settings(self, stall_timeout_s: float) -> "GenerationSettings":
        from potluck.orchestrator.request import GenerationSettings

        usual = GenerationSettings()
        return GenerationSettings(
            uses_ring=self.uses_ring,
            stall_timeout_s=stall_timeout_s,
            prefill_chunk=self.prefill_chunk or usual.prefill_chunk,
            prefill_window=self.prefill_window or usual.prefill_window,
        )


def ask_via(question: RemoteQuestion) -> None:
    from potluck.net.loop import run
    from potluck.node.configuration_file import require_enabled

    require_enabled()
    if question.codec is not None and question.codec not in CODECS:
        raise BadRequest(f"--activation-dtype must be one of {', '.join(CODECS)}, not {question.codec}")
    run(_ask(question))


async def _ask(question: RemoteQuestion) -> None:
    from potluck.identity.keys import NodeKey
    from potluck.net.link import admit_anyone
    from potluck.net.tls import TlsTransport
    from potluck.node.asking import RemoteModel
    from potluck.node.node import Node

    key = NodeKey.generate()
    node = Node(key, TlsTransport(key, admit_anyone))
    try:
        await node.orchestrator.connect([address.strip() for address in question.addresses])
        await _answer(await RemoteModel.find(node, question.model), question, node)
    finally:
        await node.stop()


async def _answer(model: object, question: RemoteQuestion, node: object) -> None:
    from potluck.node.asking import RemoteModel
    from potluck.node.configuration_file import read_configuration
    from potluck.node.node import Node
    from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, ShardStatus, TokenDelta
    from potluck.orchestrator.orchestrator import DistributedChatParams

    assert isinstance(model, RemoteModel)
    assert isinstance(node, Node)
    settings = read_configuration()
    own = await _serve_own(model, question)
    node.orchestrator.max_concurrent_pipelines = settings.max_concurrent_pipelines
    params = DistributedChatParams(
        settings=question.generation_settings(settings.shard_health_timeout_seconds),
        fallback_to_local=settings.fallback_to_local,
        max_shards_per_request=settings.max_shards_per_request,
        own_layers=own,
    )
    codec = question.codec or settings.activation_dtype
    codec = "fp32" if codec == "auto" else codec
    request = model.request(model.encode_chat(question.messages), question.params, question.max_tokens)
    edges = [placed.stage.start for placed in node.orchestrator.pipeline_for(request, params)[1:]]
    request = model.request(request.prompt, question.params, question.max_tokens, codec, edges)  # type: ignore[arg-type]
    parts: list[str] = []
    tokens: list[int] = []
    failovers: list[dict[str, object]] = []
    began = first = time.perf_counter()
    end: object = None
    async for frame, text in model.generate(request, params):
        parts.append(text)
        if not question.as_json:
            print(text, end="", flush=True)
        if isinstance(frame, TokenDelta):
            tokens.append(frame.token)
            first = time.perf_counter() if len(tokens) == 1 else first
        elif isinstance(frame, ShardStatus) and not question.as_json:
            notice(f"\n[{frame.shard_id} {frame.status}: {frame.reason}]")
        elif isinstance(frame, ShardFailover):
            failovers.append({"lost": frame.lost, "pause_ms": round(frame.pause_ms, 1), "method": frame.method})
            if not question.as_json:
                notice(f"[failover: {', '.join(frame.lost)} replaced, pause {frame.pause_ms:.0f} ms]")
        elif isinstance(frame, Finished | PipelineAborted):
            end = frame
    elapsed = time.perf_counter() - first
    speed = (len(tokens) - 1) / elapsed if len(tokens) > 1 else 0.0
    if isinstance(end, PipelineAborted):
        raise _error_of(end.code, f"{end.message} (after {end.generated_tokens} tokens)")
    if question.as_json:
        return print_json(
            {
                "model": model.info.model, "text": "".join(parts), "finish_reason": getattr(end, "reason", "stop"),
                "prompt_tokens": len(request.prompt), "completion_tokens": len(tokens), "tokens": tokens,
                "first_token_ms": round((first - began) * 1000, 1), "tokens_per_s": round(speed, 1), "failovers": failovers,
            }
        )  # fmt: skip
    print(flush=True)
    stages = len(edges) + 1
    notice(
        f"[{len(tokens)} tokens, {speed:.0f} tokens/s, first after {(first - began) * 1000:.0f} ms, {stages} shards]"
    )


async def _serve_own(model: "RemoteModel", question: RemoteQuestion) -> "tuple[Stage, ...]":
    if question.own_layers is None:
        return ()
    from potluck.cli.models import open_store
    from potluck.node.serving import ServingSettings

    settings = ServingSettings(threads=question.threads or 1)
    return await model.serve_own_layers(question.own_layers, open_store(), settings)


def _error_of(code: str, message: str) -> PotluckError:
    return PipelineStalled(message) if code == "pipeline_stalled" else ShardUnavailable(f"{code}: {message}")
