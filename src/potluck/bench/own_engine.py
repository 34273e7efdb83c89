"""Our CPU engine as a contestant: a whole model on one machine, greedy, timed from token ids to token ids."""

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from potluck.core.errors import ModelNotFound
from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.engine.cpu_engine import CpuEngine
from potluck.engine.shard_engine import EngineSettings, Step, StepResult
from potluck.weights.checkpoint import Checkpoint
from potluck.weights.open_model import open_checkpoint


class ModelFile(msgspec.Struct, frozen=True):
    """A GGUF file, a name for its content, and where its packed form lies."""

    path: Path
    source: str
    packed_folder: Path

    @classmethod
    def outside_the_store(cls, path: Path, cache_folder: Path) -> Self:
        """Nobody has written down what is in the file, so all of it is read."""
        if not path.is_file():
            raise ModelNotFound(f"{path}: there is no such file; the benchmark takes GGUF files")
        with path.open("rb") as file:
            source = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path, source, cache_folder / "packed" / source)


class OwnEngine:
    """One engine with one session, whose prompt is kept from call to call. `with` closes engine and file."""

    def __init__(self, model: ModelFile, threads: int, notice: Callable[[str], None] | None = None) -> None:
        self._checkpoint = open_checkpoint(model.path)
        settings = EngineSettings(
            layers=LayerRange(0, self.facts.layer_count),
            threads=threads,
            cache_folder=model.packed_folder,
            source=model.source,
        )
        self._engine = CpuEngine(self._checkpoint, settings, notice)
        self._kept: tuple[int, ...] = ()
        self._session: int | None = None
        self._next_token = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()
        self._checkpoint.close()

    @property
    def facts(self) -> ModelFacts:
        return self._checkpoint.facts

    @property
    def processor(self) -> str:
        return self._engine.processor

    @property
    def bytes_per_token(self) -> int:
        return weight_bytes_per_token(self._checkpoint)

    def decode(self, prompt: Sequence[int], count: int) -> float:
        """Tokens per second over `count` tokens after the prompt, whose KV stays from call to call."""
        session, token = self._keep(prompt, count)
        start = time.perf_counter()
        for _ in range(count):
            (token,) = self._greedy([(session, [token])])
        return count / (time.perf_counter() - start)

    def prefill(self, prompt: Sequence[int]) -> float:
        """Tokens per second from the prompt's first token to the first answer."""
        self._forget()
        session = self._engine.open(len(prompt))
        start = time.perf_counter()
        self._greedy([(session, prompt)])
        seconds = time.perf_counter() - start
        self._engine.close_session(session)
        return len(prompt) / seconds

    def step_s(self, prompt: Sequence[int], width: int, repeats: int) -> float:
        """The median time of a step of `width` tokens with logits for each, as verifying a draft takes it."""
        session, _ = self._keep(prompt, width)
        draft, times = list(prompt[:width]), []
        for _ in range(repeats):
            self._engine.truncate(session, len(prompt))
            step = Step(session, len(prompt), tokens=draft, logits=range(width))
            start = time.perf_counter()
            (result,) = self._engine.forward([step])
            assert result.logits is not None
            result.logits.argmax(axis=1)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def decode_together(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """Tokens per second of all sessions, each with a prompt of its own, in batches of one token each."""
        sessions = [self._engine.open(len(prompt) + count) for prompt in prompts]
        tokens = self._greedy(list(zip(sessions, prompts, strict=True)))
        start = time.perf_counter()
        for _ in range(count):
            tokens = self._greedy([(session, [token]) for session, token in zip(sessions, tokens, strict=True)])
        seconds = time.perf_counter() - start
        for session in sessions:
            self._engine.close_session(session)
        return count * len(prompts) / seconds

    def _greedy(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """As a worker does where the likeliest token is wanted: plain decoding leaves the logits where they are."""
        steps = [
            Step(session, self._engine.length(session), tokens=tokens, logits=(len(tokens) - 1,), is_greedy=True)
            for session, tokens in parts
        ]
        return [_likeliest(result) for result in self._engine.forward(steps)]

    def _keep(self, prompt: Sequence[int], room: int) -> tuple[int, int]:
        """The session that holds exactly `prompt`, with room behind it, and the token that follows."""
        if self._session is None or self._kept != tuple(prompt):
            self._forget()
            self._session = self._engine.open(min(len(prompt) + max(room, 64), self.facts.context_length))
            (self._next_token,) = self._greedy([(self._session, prompt)])
            self._kept = tuple(prompt)
        self._engine.truncate(self._session, len(prompt))
        return self._session, self._next_token

    def _forget(self) -> None:
        if self._session is not None:
            self._engine.close_session(self._session)
        self._session, self._kept = None, ()


def _likeliest(result: StepResult) -> int:
    if result.likeliest is not None:
        return result.likeliest[0]
    assert result.logits is not None
    return int(result.logits[0].argmax())


def weight_bytes_per_token(checkpoint: Checkpoint) -> int:
    """What decoding one token reads of the file's tensors: all of them, but of an embedding only what is the output too."""
    tensors = checkpoint.tensors.values()
    is_tied = checkpoint.facts.is_output_tied
    return sum(tensor.size_bytes for tensor in tensors if tensor.name != "embedding" or is_tied)


def token_ids(count: int, vocabulary_size: int, first: int = 0) -> list[int]:
    """Token ids without a pattern that anybody could profit from; the lowest, where special tokens live, are left out."""
    low = min(500, vocabulary_size // 4)
    return [low + (index * 7919) % (vocabulary_size - low) for index in range(first, first + count)]
