"""llama.cpp, run through `xllamacpp` in a process of its own, for measurements only.

In our own process its OpenMP threads would go on spinning for a while after each answer and take cores from our engine;
so it lives in a child, does one thing when told to, and is idle otherwise.
"""

import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from potluck.core.errors import BenchmarkFailed

REQUIRED_FEATURES = ("AVX2", "FMA", "F16C")
_THREADS_TOLERANCE = 0.5  # processor seconds per second above the threads asked for
_CLOCK_TOLERANCE, _CLOCK_SLACK_S = 0.05, 0.05


class Describe(msgspec.Struct, frozen=True, tag="describe"):
    """Asks for the build's properties; loads nothing."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    path: str
    threads: int
    context: int


class Complete(msgspec.Struct, frozen=True, tag="complete"):
    """Asks for exactly `count` greedy tokens after `prompt`."""

    prompt: tuple[int, ...]
    count: int
    keeps_prompt: bool


Request = Describe | Load | Complete


class Description(msgspec.Struct, frozen=True):
    version: str
    system_info: str


class Loaded(msgspec.Struct, frozen=True):
    """The numbers of threads that llama.cpp has taken over: for single tokens, and for prompts."""

    threads: int
    batch_threads: int


class Completed(msgspec.Struct, frozen=True):
    """llama.cpp's own timings, with our clock and the process's processor time beside them."""

    cached_tokens: int
    prompt_tokens: int
    prompt_s: float
    predicted_tokens: int
    predicted_s: float
    wall_s: float
    processor_s: float

    @property
    def prompt_speed(self) -> float:
        return self.prompt_tokens / self.prompt_s

    @property
    def decode_speed(self) -> float:
        # Its clock starts when the first token, which belongs to the prompt, is there.
        return (self.predicted_tokens - 1) / self.predicted_s

    @property
    def threads_used(self) -> float:
        return self.processor_s / self.wall_s


class Failed(msgspec.Struct, frozen=True):
    error: str


def features_of(system_info: str) -> dict[str, bool]:
    """`CPU : AVX2 = 1 | FMA = 0 | …` as a mapping."""
    return {name: value != "0" for name, value in re.findall(r"(\w+) = (\d+)", system_info)}


def require_features(system_info: str) -> None:
    """Raises BenchmarkFailed for a build without the vector instructions that an honest comparison needs."""
    features = features_of(system_info)
    missing = [name for name in REQUIRED_FEATURES if not features.get(name, False)]
    if missing:
        raise BenchmarkFailed(
            f"llama.cpp reports no {', '.join(missing)} here, so a comparison would flatter us; it says: {system_info.strip()}"
        )


def require_installed() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise BenchmarkFailed(
            f"the comparison needs llama.cpp's Python package: {sys.executable} -m pip install xllamacpp"
        )


def check_completed(done: Completed, request: Complete, threads: int) -> Completed:
    """Raises BenchmarkFailed where llama.cpp did something else than it was asked to, or where its clock is not ours."""
    problems = []
    if done.cached_tokens + done.prompt_tokens != len(request.prompt):
        problems.append(f"{done.cached_tokens} + {done.prompt_tokens} prompt tokens instead of {len(request.prompt)}")
    if done.cached_tokens and not request.keeps_prompt:
        problems.append(f"{done.cached_tokens} tokens came from a cache")
    if done.predicted_tokens != request.count:
        problems.append(f"{done.predicted_tokens} tokens instead of {request.count}")
    if done.threads_used > threads + _THREADS_TOLERANCE:
        problems.append(f"{done.threads_used:.1f} threads were busy instead of {threads}")
    if abs(done.wall_s - done.prompt_s - done.predicted_s) > _CLOCK_TOLERANCE * done.wall_s + _CLOCK_SLACK_S:
        problems.append(f"it says {done.prompt_s + done.predicted_s:.3f} s where our clock says {done.wall_s:.3f} s")
    if problems:
        raise BenchmarkFailed("llama.cpp's figures cannot be used: " + "; ".join(problems))
    return done


_Answer = TypeVar("_Answer", Description, Loaded, Completed)


class LlamaCppProcess:
    """A child that holds at most one model. Leaving the `with` block ends it."""

    def __init__(self) -> None:
        require_installed()
        # llama.cpp writes its complaints here; without a file of their own they would mix with our table.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "potluck.bench.llama_cpp_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
        )

    def __repr__(self) -> str:
        return f"<LlamaCppProcess {self._child.pid}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout, self._complaints):
            if stream is not None:
                stream.close()

    def describe(self) -> Description:
        """What this build is. Raises BenchmarkFailed where a comparison with it would not be fair."""
        description = self._ask(Describe(), Description)
        require_features(description.system_info)
        return description

    def load(self, path: Path, threads: int, context: int) -> "LlamaCppEngine":
        self.describe()
        loaded = self._ask(Load(str(path), threads, context), Loaded)
        if (loaded.threads, loaded.batch_threads) != (threads, threads):
            raise BenchmarkFailed(f"llama.cpp took {loaded} instead of {threads} threads")
        return LlamaCppEngine(self, threads)

    def complete(self, request: Complete) -> Completed:
        return self._ask(request, Completed)

    def _ask(self, request: Request, kind: type[_Answer]) -> _Answer:
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(msgspec.json.encode(request) + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise BenchmarkFailed(f"llama.cpp's process died: {self._last_complaint()}")
        answer = _decoded(line, kind)
        if isinstance(answer, Failed):
            raise BenchmarkFailed(f"llama.cpp: {answer.error}; {self._last_complaint()}")
        return answer

    def _last_complaint(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it left no message"


def _decoded(line: bytes, kind: type[_Answer]) -> "_Answer | Failed":
    fields: Mapping[str, object] = msgspec.json.decode(line, type=dict[str, object])
    return msgspec.convert(fields, type=Failed) if "error" in fields else msgspec.convert(fields, type=kind)


class LlamaCppEngine:
    """A loaded model as a contestant. Every answer is checked before its figure is used."""

    def __init__(self, process: LlamaCppProcess, threads: int) -> None:
        self._process = process
        self._threads = threads
        self.threads_used: list[float] = []

    def decode(self, prompt: Sequence[int], count: int) -> float:
        """Tokens per second over `count` tokens after the prompt, whose KV stays from call to call."""
        done = self._complete(Complete(tuple(prompt), count + 1, keeps_prompt=True))
        return done.decode_speed

    def prefill(self, prompt: Sequence[int]) -> float:
        """Tokens per second from the prompt's first token to the first answer, nothing kept from before."""
        return self._complete(Complete(tuple(prompt), 1, keeps_prompt=False)).prompt_speed

    def _complete(self, request: Complete) -> Completed:
        done = check_completed(self._process.complete(request), request, self._threads)
        self.threads_used.append(done.threads_used)
        return done
