"""What every engine is: sessions over one shard of a model, steps that are checked before any is run, and what comes out.

Knows no kernels and no device, and imports none; `cpu_engine` and `cuda` fill in the arithmetic.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from potluck.core.errors import BadRequest, ContextLengthExceeded, UnknownArchitecture
from potluck.core.exactness import Exactness
from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.engine.kv_cache import KvCache, KvSession
from potluck.engine.kv_format import PAGE_POSITIONS

Floats = npt.NDArray[np.float32]
Round = Callable[[Floats], Floats]
Notice = Callable[[str], None]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to run a shard. `processor` forces a kind of kernel (tests); `cache_folder` None keeps packed weights in memory."""

    layers: LayerRange | None  # None: no layers, only the embedding or the output
    has_embedding: bool = True
    has_output: bool = True
    threads: int = 1
    kv_budget_bytes: int = 1 << 30
    cache_folder: Path | None = None
    source: str | None = None  # identifies the model's content; a cache folder needs it
    processor: str | None = None
    max_rows: int | None = None
    device: str = "cpu"  # or "cuda", "cuda:1"
    device_budget_bytes: int | None = None  # what weights and KV may take of a GPU; None: what is free
    is_batch_invariant: bool = False  # on a GPU: one kernel for every number of rows, at some cost; a CPU is anyway


class Step(msgspec.Struct, frozen=True):
    """Some consecutive tokens of one session: token ids where the shard owns the embedding, hidden rows where it does not.

    `position` must be the session's length. `logits` lists which of the step's tokens to return logits for. `is_greedy`: the
    likeliest token would do; an engine for which logits are far away may return `likeliest` instead. `wants_hidden`: without it an
    engine that would have to fetch them may return no hidden rows.
    """

    session: int
    position: int
    tokens: Sequence[int] | None = None
    hidden: Floats | None = None
    logits: Sequence[int] = ()
    is_greedy: bool = False
    wants_hidden: bool = True

    @property
    def count(self) -> int:
        if self.tokens is not None:
            return len(self.tokens)
        return len(self.hidden) if self.hidden is not None and self.hidden.ndim else 0


class StepResult(msgspec.Struct, frozen=True):
    """`hidden`: (tokens, hidden size) out of the shard's last layer, or (0, hidden size); `logits`: (chosen tokens, vocabulary).

    `likeliest`: instead of logits, the token with the largest (of equal ones the lowest id), -1 where one is not a number.
    """

    hidden: Floats
    logits: Floats | None
    likeliest: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Rounding:
    """What a link at this place would have done to the activations that enter `layer`; see the session's boundaries."""

    layer: int
    apply: Callable[[Floats], Floats]


@dataclass(frozen=True)
class EngineSession:
    """A session's part of the shard's layers, and its keys and values there."""

    layers: LayerRange | None
    kv: KvSession

    @property
    def begins_with_tokens(self) -> bool:
        return self.layers is None or self.layers.start == 0


class ShardEngine(ABC):
    """`open / forward / truncate / fork / close` on sessions of one shard. One caller at a time."""

    kv: KvCache

    def __init__(self, facts: ModelFacts, settings: EngineSettings) -> None:
        if settings.layers is not None and settings.layers.stop > facts.layer_count:
            raise BadRequest(f"layers {settings.layers} go past the last one: this model has 0-{facts.layer_count - 1}")
        if facts.has_feed_forward_bias:
            raise UnknownArchitecture(
                facts.name, "feed-forward bias", "biases in the feed-forward part are not supported"
            )
        self.facts, self.settings = facts, settings
        self._sessions: dict[int, EngineSession] = {}
        self._next_session = 1

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.facts.name} {self.settings.layers} {self.processor}, {len(self._sessions)} sessions>"

    @property
    @abstractmethod
    def processor(self) -> str:
        """What computes, for people."""

    @property
    def device_bytes(self) -> int:
        """What it takes of a GPU's memory, for good."""
        return 0

    @property
    @abstractmethod
    def exactness(self) -> Exactness: ...

    @abstractmethod
    def forward(self, steps: Sequence[Step], roundings: Sequence[Rounding] = ()) -> list[StepResult]:
        """Runs all steps (of different sessions on the same layers) as one batch. Every step is checked before any is run.

        `roundings` are applied to what enters their layers, and to what enters the output where they name the layer after the
        last; hidden states that the caller brings are its own business.
        """

    @property
    @abstractmethod
    def output_rows(self) -> int:
        """How many rows `project` takes at once; 0 without the output."""

    @abstractmethod
    def project(self, session: int, rows: Floats, roundings: Sequence[Rounding] = ()) -> Floats:
        """Logits of some rows that `forward` has given for this session, as it would have given them itself."""

    def _check_projection(self, session: EngineSession, rows: int) -> None:
        if not self.settings.has_output or not self._ends_with(session):
            raise BadRequest("this shard does not own the output head")
        if not 1 <= rows <= self.output_rows:
            raise BadRequest(f"logits of {rows} rows were asked for; at most {self.output_rows} go at once")

    def prepare(self) -> None:  # noqa: B027 (most engines have nothing to prepare)
        """Makes ready what would otherwise hold up the first steps."""

    def expect(self, session: int) -> None:  # noqa: B027 (the same)
        """One more token of this session is likely to be asked for next: what can be done ahead of it is done now.

        The hidden rows that such a step gives may be the engine's own, and hold until it is asked for anything else.
        """

    def claim_device(self) -> None:  # noqa: B027 (most engines have theirs for themselves)
        """A step is likely to come soon: a device that computes for another process should turn to this one as soon as it is done there."""

    def settle(self) -> None:  # noqa: B027 (most engines have nothing to give back)
        """After the first steps: gives back what nothing but them needed."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back; the engine cannot be used afterwards."""

    # ------------------------------------------------------------ sessions

    def open(self, positions: int, layers: LayerRange | None = None) -> int:
        """Reserves KV for `positions` in `layers` (all of the shard's by default); refuses at once where there is no room."""
        self._require_context(positions)
        part = layers if layers is not None else self.settings.layers
        if part is not None:
            self._require_own(part)
        return self._register(EngineSession(part, self.kv.open(positions, 0 if part is None else len(part))))

    def fork(self, session: int, positions: int) -> int:
        """A session that continues from all of `session`'s positions, sharing their KV."""
        self._require_context(positions)
        parent = self._session(session)
        return self._register(EngineSession(parent.layers, self.kv.fork(parent.kv, positions)))

    def _require_context(self, positions: int) -> None:
        if positions > self.facts.context_length:
            raise ContextLengthExceeded(
                f"{positions} positions are more than this model's context of {self.facts.context_length}"
            )

    def park(self, session: int, length: int) -> None:
        """Keeps `length` positions for later forks, and no room for more."""
        self.truncate(session, length)
        self.kv.shrink(self._session(session).kv)

    def truncate(self, session: int, length: int) -> None:
        self.kv.truncate(self._session(session).kv, length)

    def close_session(self, session: int) -> None:
        self.kv.close(self._session(session).kv)
        del self._sessions[session]

    def length(self, session: int) -> int:
        return self._session(session).kv.length

    def export_kv(self, session: int, layers: LayerRange) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """Keys and values of `layers` (counted in the model), each (layers, positions, heads, head size)."""
        held, first, stop = self._within(session, layers)
        return self.kv.export(held, first, stop)

    def import_kv(
        self, session: int, layers: LayerRange, keys: npt.NDArray[np.generic], values: npt.NDArray[np.generic]
    ) -> None:
        held, first, stop = self._within(session, layers)
        self.kv.import_(held, first, stop, keys, values)

    def _register(self, session: EngineSession) -> int:
        number = self._next_session
        self._next_session += 1
        self._sessions[number] = session
        return number

    def _session(self, number: int) -> EngineSession:
        try:
            return self._sessions[number]
        except KeyError:
            raise BadRequest(f"there is no session {number}") from None

    def _require_own(self, layers: LayerRange) -> None:
        mine = self.settings.layers
        if mine is None or layers.start < mine.start or layers.stop > mine.stop:
            raise BadRequest(f"layers {layers} are not all in this shard, which holds {mine or 'none'}")

    def _within(self, session: int, layers: LayerRange) -> tuple[KvSession, int, int]:
        held = self._session(session)
        if held.layers is None or layers.start < held.layers.start or layers.stop > held.layers.stop:
            raise BadRequest(f"layers {layers} are not all in session {session}, which has {held.layers or 'none'}")
        return held.kv, layers.start - held.layers.start, layers.stop - held.layers.start

    # ------------------------------------------------------------ checks

    def _check(self, steps: Sequence[Step]) -> None:
        if not steps:
            raise BadRequest("a batch needs at least one step")
        if len({step.session for step in steps}) != len(steps):
            raise BadRequest("a session can take part in a batch only once")
        sessions = [self._session(step.session) for step in steps]
        if len(steps) > 1 and len({session.layers for session in sessions}) != 1:
            raise BadRequest("all sessions of a batch must use the same layers")
        for step, session in zip(steps, sessions, strict=True):
            if not self._is_usual(step, session):
                self._check_step(step, session)

    def _is_usual(self, step: Step, session: EngineSession) -> bool:
        """One token that nothing speaks against: seen at a glance, as it is what comes nearly always."""
        kv = session.kv
        return (
            step.position == kv.length < self.facts.context_length
            and kv.length < len(kv.pages) * PAGE_POSITIONS  # a page that is there was reserved
            and (self._is_token(step, session) if step.hidden is None else self._is_row(step))
            and (not step.logits or (step.logits == (0,) and self.settings.has_output and self._ends_with(session)))
        )

    def _is_token(self, step: Step, session: EngineSession) -> bool:
        tokens = step.tokens
        return (
            tokens is not None
            and len(tokens) == 1
            and 0 <= tokens[0] < self.facts.vocabulary_size
            and self.settings.has_embedding
            and session.begins_with_tokens
        )

    def _is_row(self, step: Step) -> bool:
        rows = step.hidden
        return (
            rows is not None
            and step.tokens is None
            and rows.shape == (1, self.facts.hidden_size)
            and rows.dtype == np.float32
        )

    def _check_step(self, step: Step, session: EngineSession) -> None:
        if step.position != session.kv.length:
            raise BadRequest(
                f"step at position {step.position}, but session {step.session} has {session.kv.length} positions"
            )
        if step.count < 1:
            raise BadRequest("a step needs at least one token")
        if step.position + step.count > self.facts.context_length:
            raise ContextLengthExceeded(
                f"position {step.position + step.count - 1} is past {self.facts.context_length}"
            )
        self.kv.require_room(session.kv, step.count)
        self._check_input(step, session)
        if step.logits and (not self.settings.has_output or not self._ends_with(session)):
            raise BadRequest("this shard does not own the output head")
        if not all(0 <= index < step.count for index in step.logits):
            raise BadRequest(f"logits were asked for tokens that this step of {step.count} does not have")

    def _ends_with(self, session: EngineSession) -> bool:
        """Whether the session goes through the shard's last layer, after which the output comes."""
        return (
            session.layers is None or self.settings.layers is None or session.layers.stop == self.settings.layers.stop
        )

    def _check_input(self, step: Step, session: EngineSession) -> None:
        if (step.hidden is None) == (step.tokens is None):
            raise BadRequest("a step has either token ids or hidden states")
        if step.tokens is not None:
            if not self.settings.has_embedding or not session.begins_with_tokens:
                raise BadRequest("this shard takes hidden states, not token ids")
            if not all(0 <= token < self.facts.vocabulary_size for token in step.tokens):
                raise BadRequest(f"token ids must be from 0 to {self.facts.vocabulary_size - 1}")
        elif step.hidden is not None and (
            step.hidden.dtype != np.float32
            or step.hidden.ndim != 2
            or step.hidden.shape[1:] != (self.facts.hidden_size,)
        ):
            raise BadRequest(f"hidden states must be float32 rows of {self.facts.hidden_size}")


def at_ends(layers: LayerRange | None, roundings: Sequence[Rounding]) -> tuple[Round | None, Round | None]:
    """What is done to embedded tokens before the first layer, and to rows between the last layer and the output.

    Without layers in between there is a link on one side, which has rounded already.
    """
    if layers is None:
        return None, None
    by_layer = {rounding.layer: rounding.apply for rounding in roundings}
    return by_layer.get(layers.start), by_layer.get(layers.stop)
