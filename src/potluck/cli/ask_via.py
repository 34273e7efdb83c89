"""`potluck ask --via`: the question goes over shards on other machines; prints text as it comes, and what happened to the shards."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from potluck.cli.console import counted, harmless, notice, one_line, print_json
from potluck.core.errors import BadRequest, GenerationAborted
from potluck.core.processors import usable_cores
from potluck.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from potluck.node.asking import RemoteModel
    from potluck.node.node import Node
    from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover
    from potluck.orchestrator.params import DistributedChatParams
    from potluck.orchestrator.request import GenerationSettings
    from potluck.wire.messages import Stage

CODECS = ("auto", "fp32", "fp16", "int8")


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
            prefill_window=self.prefill_window,
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


async def _answer(model: "RemoteModel", question: RemoteQuestion, node: "Node") -> None:
    params = _chat_params(question, await _serve_own(model, question))
    if params.fallback_to_local and not params.own_layers:
        _offer_own_copy(model, question)
    request = model.request(model.encode_chat(question.messages), question.params, question.max_tokens)
    shard_count = len(node.orchestrator.pipeline_for(request, params))
    told = _Told(question.as_json, time.perf_counter())
    async for frame, text in model.generate(request, params):
        told.take(frame, text, time.perf_counter())
    told.require_end()
    if question.as_json:
        return print_json({"model": model.info.model, "prompt_tokens": len(request.prompt), **told.report()})
    print(flush=True)
    return notice(told.summary(shard_count))


def _chat_params(question: RemoteQuestion, own_layers: "tuple[Stage, ...]") -> "DistributedChatParams":
    from potluck.node.configuration_file import read_configuration
    from potluck.orchestrator.params import DistributedChatParams

    settings = read_configuration()
    return DistributedChatParams(
        settings=question.generation_settings(settings.shard_health_timeout_seconds),
        fallback_to_local=settings.fallback_to_local,
        max_shards_per_request=settings.max_shards_per_request,
        own_layers=own_layers,
        activation_dtype=question.codec or settings.activation_dtype,  # type: ignore[arg-type] # one of CODECS
    )


@dataclass
class _Told:
    """What the shards have told so far, printed as it comes unless everything is wanted as JSON at the end."""

    is_silent: bool
    began_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    failovers: list[dict[str, object]] = field(default_factory=list)
    end: "Finished | PipelineAborted | None" = None

    def take(self, frame: object, text: str, now_s: float) -> None:
        from potluck.orchestrator.frames import Finished, PipelineAborted, ShardFailover, ShardStatus, TokenDelta

        self.parts.append(text)
        if not self.is_silent:
            print(harmless(text), end="", flush=True)
        if isinstance(frame, TokenDelta):
            self.tokens.append(frame.token)
            self.first_s, self.last_s = self.first_s or now_s, now_s
        elif isinstance(frame, ShardStatus):
            self._say(f"{frame.shard_id} {frame.status}: {frame.reason}")
        elif isinstance(frame, ShardFailover):
            self.failovers.append(_shown_failover(frame))
            self._say(f"failover: {', '.join(frame.lost)} replaced, pause {frame.pause_ms:.0f} ms{_weaker(frame)}")
        elif isinstance(frame, Finished | PipelineAborted):
            self.end = frame

    def require_end(self) -> None:
        """Raises what the pipeline gave up with."""
        from potluck.orchestrator.frames import PipelineAborted

        if isinstance(self.end, PipelineAborted):
            raise GenerationAborted(self.end.code, f"{self.end.message} (after {self.end.generated_tokens} tokens)")

    def report(self) -> dict[str, object]:
        return {
            "text": "".join(self.parts), "finish_reason": getattr(self.end, "reason", "stop"),
            "completion_tokens": len(self.tokens), "tokens": self.tokens, "first_token_ms": round(self._first_ms, 1),
            "tokens_per_s": round(self._tokens_per_s, 1), "failovers": self.failovers,
            "exactness": getattr(self.end, "exactness", "bitwise"),
        }  # fmt: skip

    def summary(self, shard_count: int) -> str:
        return (
            f"[{counted(len(self.tokens), 'token')}, {self._tokens_per_s:.0f} tokens/s, "
            f"first after {self._first_ms:.0f} ms, {counted(shard_count, 'shard')}{_weaker(self.end)}]"
        )

    @property
    def _tokens_per_s(self) -> float:
        return (len(self.tokens) - 1) / max(self.last_s - self.first_s, 1e-9) if len(self.tokens) > 1 else 0.0

    @property
    def _first_ms(self) -> float:
        return (self.first_s - self.began_s) * 1000 if self.tokens else 0.0

    def _say(self, text: str) -> None:
        if not self.is_silent:
            notice(f"\n[{one_line(text)}]")


def _shown_failover(frame: "ShardFailover") -> dict[str, object]:
    return {
        "lost": frame.lost, "pause_ms": round(frame.pause_ms, 1), "method": frame.method, "exactness": frame.exactness,
    }  # fmt: skip


def _weaker(frame: object) -> str:
    """What an answer has that is not the same bits whoever computes it."""
    level = getattr(frame, "exactness", "bitwise")
    return "" if level == "bitwise" else f", exactness {level}"


async def _serve_own(model: "RemoteModel", question: RemoteQuestion) -> "tuple[Stage, ...]":
    if question.own_layers is None:
        return ()
    from potluck.cli.models import open_store
    from potluck.node.machine import computing_threads
    from potluck.node.serving import ServingSettings

    settings = ServingSettings(threads=question.threads or computing_threads())
    return await model.serve_own_layers(question.own_layers, open_store(), settings)


def _offer_own_copy(model: "RemoteModel", question: RemoteQuestion) -> None:
    from potluck.cli.models import open_store
    from potluck.node.serving import ServingSettings

    model.offer_own_copy(open_store(), ServingSettings(threads=question.threads or usable_cores()))
