"""`potluck bench …`: measures this machine and prints what it found beside what was promised. `bench` does the work."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from potluck.cli.console import EXIT_FAILURE, JsonOption, format_table, notice, print_json
from potluck.cli.models import open_store
from potluck.core.errors import BadRequest
from potluck.weights.catalogue import DEFAULT_MODEL_ID

if TYPE_CHECKING:
    from rich.table import Table

    from potluck.bench.chaos import ChaosReport
    from potluck.bench.own_engine import ModelFile
    from potluck.bench.report import EngineReport, Line

app = typer.Typer(help="Measure what this machine achieves.", rich_markup_mode=None)

DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu; or cuda, cuda:N: random weights of real shapes on a GPU.")
]
LLAMA_CPP = "llama.cpp"
_QUICK = {"rounds": 3, "decode_tokens": 32, "deep_tokens": 16, "large_tokens": 8, "step_repeats": 8}
_MAX_THREADS = 256
_QUIET_CORES = 0.2
_WIDE = 160  # columns where there is no terminal: a pipe or a file must not cut lines


@app.callback()
def bench() -> None:
    """Here so that `engine` stays a command of its own while it is the only one."""


@app.command("engine")
def engine(
    model: Annotated[str, typer.Option("--model", metavar="ID|PATH", help="A stored model, or a GGUF file.")] = (
        DEFAULT_MODEL_ID
    ),
    against: Annotated[
        str | None, typer.Option("--against", metavar=LLAMA_CPP, help="Measure this beside us, taking turns.")
    ] = None,
    threads: Annotated[str, typer.Option("--threads", help="Numbers of threads to measure with.")] = "1,2",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds: a rough idea.")] = False,
    check: Annotated[bool, typer.Option("--check", help="End with exit code 1 where a bar is missed.")] = False,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure the engine: decode, prefill, drafts, batches, long contexts, large models, a busy core beside it."""
    if device != "cpu":
        return cuda_engine(device, quick, as_json)
    from potluck.bench.engine import EngineBenchSettings, bench_engine
    from potluck.bench.report import as_json as report_as_json
    from potluck.bench.report import missed
    from potluck.core.paths import locate_folders

    if against not in (None, LLAMA_CPP):
        raise BadRequest(f"--against knows {LLAMA_CPP} only, not {against!r}")
    thread_counts, cache_folder = parse_threads(threads), locate_folders().cache
    settings = EngineBenchSettings(
        name=model,
        model=model_file(model, cache_folder),
        cache_folder=cache_folder,
        threads=thread_counts,
        is_against_llama_cpp=against is not None,
    )
    if quick:
        settings = msgspec.structs.replace(settings, **_QUICK)
    report = bench_engine(settings, _ignore if as_json else notice)
    if as_json:
        print_json(report_as_json(report))
    else:
        print_report(report)
    if check and missed(report):
        raise typer.Exit(EXIT_FAILURE)
    return None


def cuda_engine(device: str, quick: bool, as_json: bool) -> None:
    from potluck.bench.cuda_engine import HEADER, CudaBenchSettings, as_rows, bench_cuda_engine

    settings = CudaBenchSettings(device=device, rounds=2 if quick else 5)
    report = bench_cuda_engine(settings, _ignore if as_json else notice)
    if as_json:
        return print_json(report)
    print(
        f"{report.gpu}: copying {report.copy_bytes_per_s / 1e12:.2f} TB/s, bf16 products "
        f"{report.matrix_operations_per_s / 1e12:.0f} TFLOP/s"
    )
    print(format_table(HEADER, as_rows(report), range(1, len(HEADER))))
    return None


def cuda_pipeline(device: str, quick: bool, as_json: bool) -> None:
    from potluck.bench.cuda_pipeline import CudaPipelineSettings, as_lines, bench_cuda_pipeline

    settings = CudaPipelineSettings(device=device, rounds=2 if quick else 5)
    figures = bench_cuda_pipeline(settings, _ignore if as_json else notice)
    if as_json:
        return print_json(figures)
    print("\n".join(as_lines(figures)))
    return None


@app.command("pipeline")
def pipeline(
    model: Annotated[str, typer.Option("--model", metavar="ID", help="A stored model.")] = DEFAULT_MODEL_ID,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds: a rough idea.")] = False,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure what a split costs: two shards on loopback over TLS against the unsplit model, then more shards."""
    if device != "cpu":
        return cuda_pipeline(device, quick, as_json)
    from potluck.bench.own_engine import ModelFile
    from potluck.bench.pipeline import PipelineBenchSettings, bench_pipeline

    store = open_store()
    entry = store.find(model)
    file = ModelFile(path=store.path(model), source=entry.weights_sha256, packed_folder=store.packed_folder(model))
    settings = PipelineBenchSettings(model=entry.id, file=file, layer_count=entry.layer_count)
    if quick:
        settings = msgspec.structs.replace(settings, rounds=2, decode_tokens=32, shard_counts=(2,))
    report = bench_pipeline(settings, _ignore if as_json else notice)
    if as_json:
        return print_json(report)
    rows = (
        ("decode, 2 shards / unsplit", report.split_ratio, "≥ 0.85"),
        ("own cost per hop, p50 ms", report.hop_p50_ms, "≤ 0.4"),
        ("own cost per hop, p95 ms", report.hop_p95_ms, "≤ 1"),
        ("prefill of 1,024 tokens, 2 shards / unsplit", report.prefill_ratio, "≥ 1.6"),
        ("8 sessions / one session, tokens/s", report.batch_ratio, "≥ 3.5"),
    )
    print(format_table(("WHAT", "FIGURE", "BAR"), [(what, f"{value:.3f}", bar) for what, value, bar in rows], (1,)))
    header = ("SHARDS", "HOP P50 MS", "HOP P95 MS", "COMPUTE MS", "QUEUE MS", "WIRE MS", "TOKENS/S")
    print(
        format_table(header, [tuple(f"{v:.3g}" for v in msgspec.structs.astuple(hop)) for hop in report.hops], range(7))
    )
    return None


@app.command("chaos")
def chaos(
    kills: Annotated[int, typer.Option("--kills", min=1, max=100_000, help="How many answers to disturb.")] = 30,
    model: Annotated[str, typer.Option("--model", metavar="ID", help="A stored model.")] = DEFAULT_MODEL_ID,
    seed: Annotated[int, typer.Option("--seed", help="Draws the same blows again.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Kill and stop shards in the middle of answers: is every text the undisturbed one, and how long are the pauses?"""
    from potluck.bench.chaos import ChaosSettings, bench_chaos

    signal.signal(signal.SIGTERM, _interrupt)  # the nodes are ended on the way out, as after Ctrl-C
    entry = open_store().find(model)
    settings = ChaosSettings(model=entry.id, layer_count=entry.layer_count, kills=kills, seed=seed)
    report = bench_chaos(settings, _ignore if as_json else notice)
    if as_json:
        print_json(report)
    else:
        print_chaos(report)
    if report.identical != report.kills:
        raise typer.Exit(EXIT_FAILURE)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def print_chaos(report: "ChaosReport") -> None:
    rows = [
        (each.kind, str(each.runs), str(each.identical), f"{each.pause_p50_ms:.0f}", f"{each.pause_max_ms:.0f}")
        for each in report.kinds
    ]
    print(format_table(("WHAT", "RUNS", "IDENTICAL", "PAUSE P50 MS", "MAX MS"), rows, range(1, 5)))
    print(
        f"\n{report.identical} of {report.kills} disturbed answers identical to the undisturbed one ({report.signals} signals, "
        f"{report.failovers} failovers); pause p50 {report.pause_p50_ms:.0f} ms, p95 {report.pause_p95_ms:.0f} ms, "
        f"max {report.pause_max_ms:.0f} ms"
    )
    for each in report.mismatches:
        notice(f"DIFFERENT: {each}")


def _ignore(_: str) -> None:
    return


def model_file(model: str, cache_folder: Path) -> "ModelFile":
    """A file where it looks like one, otherwise the stored model with this id."""
    from potluck.bench.own_engine import ModelFile

    path = Path(model).expanduser()
    if path.name != model or path.suffix == ".gguf":
        return ModelFile.outside_the_store(path, cache_folder)
    store = open_store()
    entry = store.find(model)
    if entry.format != "gguf":
        raise BadRequest(f"{model} is not a GGUF file; the benchmark takes nothing else")
    return ModelFile(store.path(model), entry.weights_sha256, store.packed_folder(model))


def parse_threads(text: str) -> tuple[int, ...]:
    """`1,2` as (1, 2), in ascending order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MAX_THREADS for part in parts):
        raise BadRequest(f"--threads takes numbers from 1 to {_MAX_THREADS} with commas between, not {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def print_report(report: "EngineReport") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDE)
    heading = f"{report.model} on {report.processor}, {report.cores} cores, {report.kernels} kernels"
    if report.llama_cpp_system_info is not None:
        heading += f"\nbeside llama.cpp ({report.llama_cpp_system_info.strip(' |')})"
    console.print(heading, "", sep="\n", markup=False, soft_wrap=True)
    console.print(report_table(report))
    if report.other_load > _QUIET_CORES:
        notice(f"other programs kept {report.other_load:.1f} cores busy: these figures are noisy")


def report_table(report: "EngineReport") -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from potluck.bench.report import lines

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for name in ("threads", "ours", "beside", "ratio", "bar"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("met", no_wrap=True)
    table.add_column("")
    for line in lines(report):
        table.add_row(*table_row(line), style="red" if line.is_met is False else None)
    return table


def table_row(line: "Line") -> tuple[str, ...]:
    """The cells of one line; `beside` is llama.cpp, or our own single step, session or thread."""
    return (
        line.bar.title,
        "" if line.threads is None else str(line.threads),
        f"{shown(line.ours)} {line.unit}",
        "" if line.theirs is None else shown(line.theirs),
        "" if line.ratio is None else f"{line.ratio:.2f}",
        "" if line.ratio is None else line.bar.shown(line.threads),
        {None: "", True: "yes", False: "no"}[line.is_met],
        line.detail,
    )


def shown(value: float) -> str:
    """Three digits, and more only before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
