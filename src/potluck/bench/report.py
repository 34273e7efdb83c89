"""What a run of `potluck bench engine` found: raw figures, ratios, and the bars they are held against. Pure."""

import math
import operator
import statistics
from collections.abc import Mapping, Sequence

import msgspec

DEPTH = 2000
PREFILL_TOKENS = 512
BATCH_SESSIONS = 8
VERIFY_TOKENS = 4


class Contest(msgspec.Struct, frozen=True):
    """Tokens per second in each round; llama.cpp's are missing where only we ran."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        return statistics.median(self.ours) / statistics.median(self.theirs) if self.theirs else None


class LargeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A 1.5B-shaped model: decoding, and the machine's read bandwidth measured between the same rounds."""

    decode: Contest
    bytes_per_token: int
    read_bandwidth: tuple[float, ...]  # bytes per second


class ThreadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """All figures for one number of threads."""

    decode: Contest
    prefill: Contest
    deep_decode: Contest
    one_step_s: tuple[float, ...]
    verify_step_s: tuple[float, ...]
    one_session: tuple[float, ...]  # tokens per second
    all_sessions: tuple[float, ...]
    large: dict[str, LargeFigures]
    llama_cpp_threads_used: float | None = None

    @property
    def verify_ratio(self) -> float:
        return statistics.median(self.verify_step_s) / statistics.median(self.one_step_s)

    @property
    def batch_ratio(self) -> float:
        return statistics.median(self.all_sessions) / statistics.median(self.one_session)


class BusyCoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Our decode speed beside a busy core: with engines that ran before it came, and with engines that started beside it."""

    one_thread: tuple[float, ...]
    two_threads: tuple[float, ...]
    one_thread_started_beside: tuple[float, ...]
    two_threads_started_beside: tuple[float, ...]

    def pairs(self) -> dict[str, tuple[Sequence[float], Sequence[float]]]:
        return {
            "engine was there first": (self.two_threads, self.one_thread),
            "engine started beside it": (self.two_threads_started_beside, self.one_thread_started_beside),
        }


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    file: str
    rounds: int
    processor: str
    cores: int
    kernels: str
    other_load: float  # cores that other programs kept busy before or after
    threads: dict[int, ThreadFigures]
    busy_core: BusyCoreFigures | None = None
    llama_cpp_version: str | None = None
    llama_cpp_system_info: str | None = None


class Bar(msgspec.Struct, frozen=True):
    """What the issue asks for: a ratio of at least (or at most) `limit`; `limits` has exceptions by threads."""

    key: str
    title: str
    limit: float
    is_at_most: bool = False
    limits: Mapping[int, float] = {}

    def limit_for(self, threads: int | None) -> float:
        return self.limit if threads is None else self.limits.get(threads, self.limit)

    def is_met(self, ratio: float, threads: int | None) -> bool:
        limit = self.limit_for(threads)
        return ratio <= limit if self.is_at_most else ratio >= limit

    def shown(self, threads: int | None) -> str:
        return f"{'≤' if self.is_at_most else '≥'} {self.limit_for(threads):.1f}"


BARS = {
    bar.key: bar
    for bar in (
        Bar("decode", "decode", 1.6),
        Bar("prefill", f"prefill of {PREFILL_TOKENS}", 2.2),
        Bar("verify4", f"step of {VERIFY_TOKENS} against 1", 1.9, is_at_most=True),
        Bar("batch8", f"{BATCH_SESSIONS} sessions against 1", 2.5),
        Bar("depth2000", f"decode at depth {DEPTH}", 1.3),
        Bar("q4_0_1_5b_decode", "decode, 1.5B shape, Q4_0", 1.2),
        Bar("q4_k_1_5b_decode", "decode, 1.5B shape, Q4_K", 1.2, limits={2: 1.1}),
        Bar("busy_core", "busy core: 2 threads against 1", 1.0),
    )
}
LARGE_KEYS = {"Q4_0": "q4_0_1_5b_decode", "Q4_K": "q4_k_1_5b_decode"}


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One figure with one number of threads. `theirs` is llama.cpp's, or our own with less work beside it."""

    bar: Bar
    threads: int | None
    ours: float
    theirs: float | None
    unit: str
    ratio: float | None
    uncertainty: float = 0.0  # of the ratio: what is as good as the bar to within it is not called a miss
    detail: str = ""

    @property
    def is_met(self) -> bool | None:
        if self.ratio is None:
            return None
        return self.bar.is_met(self.ratio * (1 + (-1 if self.bar.is_at_most else 1) * self.uncertainty), self.threads)


def lines(report: EngineReport) -> list[Line]:
    """Everything that has a bar, figure by figure."""
    found = [line for threads, figures in report.threads.items() for line in _thread_lines(threads, figures)]
    order = list(BARS)
    found.sort(key=lambda line: order.index(line.bar.key))
    return found + ([_busy_line(report.busy_core)] if report.busy_core is not None else [])


def _thread_lines(threads: int, figures: ThreadFigures) -> list[Line]:
    contests = {"decode": figures.decode, "prefill": figures.prefill, "depth2000": figures.deep_decode}
    result = [_contest_line(key, threads, contest) for key, contest in contests.items()]
    result += [
        _own_line("verify4", threads, figures.verify_step_s, figures.one_step_s, "ms", 1e3),
        _own_line("batch8", threads, figures.all_sessions, figures.one_session, "tokens/s"),
    ]
    return result + [_large_line(LARGE_KEYS[name], threads, large) for name, large in figures.large.items()]


def _contest_line(key: str, threads: int, contest: Contest, detail: str = "") -> Line:
    return Line(
        bar=BARS[key],
        threads=threads,
        ours=statistics.median(contest.ours),
        theirs=statistics.median(contest.theirs) if contest.theirs else None,
        unit="tokens/s",
        ratio=contest.ratio,
        detail=detail,
    )


def _large_line(key: str, threads: int, large: LargeFigures) -> Line:
    rate = statistics.median(large.decode.ours) * large.bytes_per_token
    bandwidth = statistics.median(large.read_bandwidth)
    detail = f"{large.bytes_per_token / 1e6:.0f} MB a token, {rate / 1e9:.1f} of {bandwidth / 1e9:.1f} GB/s"
    return _contest_line(key, threads, large.decode, detail)


def _own_line(
    key: str, threads: int | None, more: Sequence[float], less: Sequence[float], unit: str, factor: float = 1.0
) -> Line:
    ours, theirs = statistics.median(more), statistics.median(less)
    return Line(
        bar=BARS[key], threads=threads, ours=ours * factor, theirs=theirs * factor, unit=unit, ratio=ours / theirs
    )


def _busy_line(figures: BusyCoreFigures) -> Line:
    """The worse case. Neighbouring rounds are compared, because the machine's speed drifts by more than what is looked for."""
    ratios = {what: sorted(map(operator.truediv, *pair)) for what, pair in figures.pairs().items()}
    worse = min(ratios, key=lambda what: statistics.median(ratios[what]))
    ratio, uncertainty = statistics.median(ratios[worse]), _median_uncertainty(ratios[worse])
    line = _own_line("busy_core", None, *figures.pairs()[worse], "tokens/s")
    detail = f"{worse}; ±{uncertainty:.1%} over {len(ratios[worse])} pairs of rounds"
    return msgspec.structs.replace(line, ratio=ratio, uncertainty=uncertainty, detail=detail)


def _median_uncertainty(values: Sequence[float]) -> float:
    """Half of the 95 % interval of the median of sorted values, as a part of it: by ranks, so whatever their distribution."""
    reach = 0.98 * math.sqrt(len(values))
    low = values[max(0, math.floor(len(values) / 2 - reach))]
    high = values[min(len(values) - 1, math.ceil(len(values) / 2 + reach))]
    return (high - low) / 2 / statistics.median(values)


def missed(report: EngineReport) -> list[Line]:
    return [line for line in lines(report) if line.is_met is False]


def as_json(report: EngineReport) -> dict[str, object]:
    """One object: each ratio at its worst, the ratios by threads, and under `figures` all that was measured."""
    result: dict[str, object] = {}
    found = lines(report)
    for key, bar in BARS.items():
        mine = [line for line in found if line.bar.key == key and line.ratio is not None]
        ratios = [line.ratio for line in mine if line.ratio is not None]
        worst = max if bar.is_at_most else min
        result[f"{key}_ratio"] = worst(ratios) if ratios else None
        if key != "busy_core":
            result[f"{key}_ratio_by_threads"] = {str(line.threads): line.ratio for line in mine}
    result["missed"] = [_named(line) for line in found if line.is_met is False]
    result["read_bandwidth"] = {str(n): _bandwidth(figures) for n, figures in report.threads.items()}
    result["figures"] = {str(n): _raw(figures) for n, figures in report.threads.items()}
    facts = msgspec.to_builtins(report)
    return result | {key: value for key, value in facts.items() if key != "threads"}


def _named(line: Line) -> dict[str, object]:
    return {"figure": line.bar.key, "threads": line.threads, "ratio": line.ratio, "bar": line.bar.shown(line.threads)}


def _bandwidth(figures: ThreadFigures) -> float | None:
    measured = [value for large in figures.large.values() for value in large.read_bandwidth]
    return statistics.median(measured) if measured else None


def _raw(figures: ThreadFigures) -> dict[str, object]:
    large = {
        name: {
            "decode": _medians(model.decode),
            "bytes_per_token": model.bytes_per_token,
            "bytes_per_second": statistics.median(model.decode.ours) * model.bytes_per_token,
            "read_bandwidth": statistics.median(model.read_bandwidth),
        }
        for name, model in figures.large.items()
    }
    return {
        "decode": _medians(figures.decode),
        "prefill": _medians(figures.prefill),
        "decode_at_depth_2000": _medians(figures.deep_decode),
        "step_of_1_s": statistics.median(figures.one_step_s),
        "step_of_4_s": statistics.median(figures.verify_step_s),
        "one_session": statistics.median(figures.one_session),
        "eight_sessions": statistics.median(figures.all_sessions),
        "large": large,
        "llama_cpp_threads_used": figures.llama_cpp_threads_used,
    }


def _medians(contest: Contest) -> dict[str, object]:
    """Tokens per second."""
    theirs = statistics.median(contest.theirs) if contest.theirs else None
    return {
        "ours": statistics.median(contest.ours),
        "llama_cpp": theirs,
        "ours_by_round": contest.ours,
        "llama_cpp_by_round": contest.theirs,
    }
