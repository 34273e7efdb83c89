"""`potluck bench …`: measures this machine and prints what it found beside what was promised. `bench` does the work."""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from potluck.cli.api_options import DEFAULT_API
from potluck.cli.console import EXIT_FAILURE, JsonOption, format_table, notice, print_json
from potluck.cli.models import open_store
from potluck.core.errors import BadRequest
from potluck.weights.catalogue import DEFAULT_MODEL_ID

if TYPE_CHECKING:
    from rich.table import Table

    from potluck.bench.chaos import ChaosReport
    from potluck.bench.own_engine import ModelFile
    from potluck.bench.pipeline import PipelineReport
    from potluck.bench.planner import PlannerReport
    from potluck.bench.report import EngineReport, Line
    from potluck.bench.swarm import SwarmReport
    from potluck.bench.weights import WeightsReport

app = typer.Typer(help="Measure what this machine achieves.", rich_markup_mode=None)

DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu; or cuda, cuda:N: random weights of real shapes on a GPU.")
]
LLAMA_CPP = "llama.cpp"
_QUICK = {"rounds": 3, "decode_tokens": 32, "deep_tokens": 16, "large_tokens": 8, "step_repeats": 8}
_MAX_THREADS = 256
_MAX_CLIENTS = 1000
_QUIET_CORES = 0.2
_WIDE = 160  # columns where there is no terminal: a pipe or a file must not cut lines


@app.callback()
def bench() -> None:
    """Here so that `engine` stays a command of its own while it is the only one."""


@app.command("engine", short_help="Measure the engine, on its own and against llama.cpp.")
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


@app.command("pipeline", short_help="Measure what a split costs.")
def pipeline(
    model: Annotated[str, typer.Option("--model", metavar="ID", help="A stored model.")] = DEFAULT_MODEL_ID,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and shorter rounds: a rough idea.")] = False,
    device: DeviceOption = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Measure what a split costs: two shards on loopback over TLS against the unsplit model, a larger model, then more shards."""
    if device != "cpu":
        return cuda_pipeline(device, quick, as_json)
    from potluck.bench.own_engine import ModelFile
    from potluck.bench.pipeline import PipelineBenchSettings, bench_pipeline

    store = open_store()
    entry = store.find(model)
    file = ModelFile(path=store.path(model), source=entry.weights_sha256, packed_folder=store.packed_folder(model))
    settings = PipelineBenchSettings(model=entry.id, file=file, layer_count=entry.layer_count)
    if quick:
        settings = msgspec.structs.replace(settings, launches=1, rounds=2, decode_tokens=32)
    say = _ignore if as_json else notice
    report = bench_pipeline(settings, say)
    if not quick:
        from potluck.bench.growth import bench_growth
        from potluck.bench.large_split import bench_large_split
        from potluck.core.paths import locate_folders

        large = bench_large_split(
            locate_folders().cache, settings.launches, settings.large_rounds, settings.decode_tokens // 4, say
        )
        report = msgspec.structs.replace(report, growth=bench_growth(settings, say), large=large)
    if as_json:
        return print_json(report)
    print_pipeline(report)
    return None


def print_pipeline(report: "PipelineReport") -> None:
    rows = [
        ("decode, 2 shards / unsplit", report.split_ratio, "≥ 0.85"),
        ("own cost per hop, p50 ms", report.hop_p50_ms, "≤ 0.4"),
        ("own cost per hop, p95 ms", report.hop_p95_ms, "≤ 1"),
        ("prefill of 1,024 tokens, 2 shards / unsplit", report.prefill_ratio, "≥ 1.6"),
        ("8 sessions / one session, tokens/s", report.batch_ratio, "≥ 3.5"),
    ]
    hops = [(report.model, report.hop)]
    if report.large is not None:
        rows.append((f"decode of {report.large.model}, 2 shards / unsplit", report.large.split_ratio, "≥ 0.95"))
        hops.append((report.large.model, report.large.hop))
    table = [(what, f"{value:.3f}", bar) for what, value, bar in rows]
    if report.growth is not None:
        table += [
            (
                f"own cost of each hop added, {each.from_shards} → {each.to_shards} shards, ms",
                f"{each.mean_ms:.3f} ± {each.error_ms:.3f}",
                "constant",
            )
            for each in report.growth.added
        ]
        hops += [(f"{report.model}, in turns", hop) for hop in report.growth.hops]
    print(format_table(("WHAT", "FIGURE", "BAR"), table, (1,)))
    header = ("SHARDS", "HOP P50 MS", "HOP P95 MS", "COMPUTE MS", "QUEUE MS", "WIRE MS", "TOKENS/S", "MODEL")
    lines = [(*(f"{v:.3g}" for v in msgspec.structs.astuple(hop)), model) for model, hop in hops]
    print(format_table(header, lines, range(7)))


@app.command("chaos", short_help="Kill and stop shards in the middle of answers.")
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


@app.command("planner", short_help="Measure how long placing and routing take.")
def planner(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, no thousand nodes: a rough idea.")] = False,
    check: Annotated[bool, typer.Option("--check", help="End with exit code 1 where a bar is missed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how long placing a model and routing a request take as a swarm grows."""
    from potluck.bench.planner import PlannerBenchSettings, bench_planner

    settings = PlannerBenchSettings()
    if quick:
        settings = msgspec.structs.replace(settings, node_counts=(10, 100), plan_rounds=1, route_rounds=3)
    report = bench_planner(settings, _ignore if as_json else notice)
    if as_json:
        print_json(report)
    else:
        print_planner(report)
    if check and not all(row.is_met for row in report.rows):
        raise typer.Exit(EXIT_FAILURE)


def print_planner(report: "PlannerReport") -> None:
    from potluck.bench.planner import PLAN_BAR_MS, ROUTE_BAR_MS

    header = ("LAYERS", "NODES", "PLAN MS", "FOR THROUGHPUT", "AGAIN", "STAGES", "ROUTE MS", "WITH STAND-INS", "MET")
    rows = [
        (
            str(row.layers), str(row.nodes), f"{row.plan_latency_ms:.1f}", f"{row.plan_throughput_ms:.1f}", f"{row.replan_ms:.1f}",
            str(row.chain), f"{row.route_ms:.1f}", f"{row.standbys_ms:.1f}", "yes" if row.is_met else "no",
        )
        for row in report.rows
    ]  # fmt: skip
    print(format_table(header, rows, range(8)))
    print(f"\nBars: a plan in {PLAN_BAR_MS:.0f} ms, a route in {ROUTE_BAR_MS:.0f} ms, at 1,000 nodes and 80 layers.")


@app.command("swarm", short_help="Simulate a swarm's membership.")
def swarm(
    nodes: Annotated[int, typer.Option("--nodes", min=4, max=5_000, help="How many nodes to simulate.")] = 100,
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, max=600, help="Simulated minutes of churn.")] = 5.0,
    seed: Annotated[int, typer.Option("--seed", help="Draws the same events again.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Simulate a swarm's membership: how soon all know of a join, a death, an expulsion, and what it costs."""
    from potluck.bench.swarm import SwarmBenchSettings, bench_swarm

    settings = SwarmBenchSettings(nodes=nodes, churn_minutes=minutes, seed=seed)
    report = bench_swarm(settings, _ignore if as_json else notice)
    if as_json:
        print_json(report)
    else:
        print_swarm(report)
    if report.churn.ghosts or not report.churn.is_converged:
        raise typer.Exit(EXIT_FAILURE)


def print_swarm(report: "SwarmReport") -> None:
    rows = (
        ("all start at once: all know all", report.cold_start_s),
        ("one joins: all know it, and it knows all", report.join_s),
        ("a process is killed: nobody counts on it", report.death_s),
        ("a machine is unplugged: nobody counts on it", report.unplugged_s),
        ("one leaves: nobody counts on it", report.leave_s),
        ("one is expelled: nobody knows it any more", report.expulsion_s),
        ("a partition ends: all know all", report.heal_s),
    )
    print(format_table(("WHAT", "SIMULATED SECONDS"), [(what, f"{seconds:.2f}") for what, seconds in rows], (1,)))
    print(
        f"\n{report.nodes} nodes, {report.links_per_node:.1f} links each; at rest {report.bytes_per_node_s:.0f} bytes and "
        f"{report.messages_per_node_s:.1f} messages per node and second\n"
        f"churn for {report.churn.minutes:g} minutes: {report.churn.went} went, {report.churn.came} came; ghosts: "
        f"{report.churn.ghosts}; afterwards all know all: {'yes' if report.churn.is_converged else 'NO'}"
    )


@app.command("api", short_help="Measure the API under load.")
def api(
    url: Annotated[str, typer.Option("--url", help="A node's API.")] = f"http://{DEFAULT_API}",
    key: Annotated[str | None, typer.Option("--key", envvar="POTLUCK_API_KEY", help="Where it asks for one.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Where it serves several.")] = None,
    clients: Annotated[str, typer.Option("--clients", help="Numbers of clients to measure with.")] = "1,4,16,64",
    tokens: Annotated[int, typer.Option("--tokens", min=2, help="Of each answer.")] = 32,
    quick: Annotated[bool, typer.Option("--quick", help="One question per client: a rough idea.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the API under load: time to first token, time between tokens, throughput."""
    import httpx

    from potluck.bench.api import ApiBenchSettings, bench_api
    from potluck.core.errors import BenchmarkFailed
    from potluck.net.loop import run

    settings = ApiBenchSettings(
        url=url, key=key, model=model, clients=parse_counts(clients, "--clients", _MAX_CLIENTS), tokens=tokens,
        requests_per_client=1 if quick else 2,
    )  # fmt: skip
    try:
        report = run(bench_api(settings, _ignore if as_json else notice))
    except httpx.HTTPError as error:
        raise BenchmarkFailed(f"{url} cannot be asked ({error}); start it with: potluck local") from None
    if as_json:
        return print_json(report)
    header = ("CLIENTS", "ANSWERS", "REFUSED", "FIRST P50 MS", "P95 MS", "NEXT P50 MS", "P95 MS", "TOKENS/S")
    rows = [tuple(f"{value:.4g}" for value in msgspec.structs.astuple(load)) for load in report.loads]
    print(format_table(header, rows, range(8)))
    return None


@app.command("weights", short_help="Measure how fast weights come from peers.")
def weights(
    model: Annotated[str, typer.Option("--model", metavar="ID", help="A stored model.")] = DEFAULT_MODEL_ID,
    sources: Annotated[int, typer.Option("--sources", min=1, max=16, help="Nodes that have the weights.")] = 5,
    liars: Annotated[int, typer.Option("--liars", min=0, help="How many of them send wrong bytes.")] = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=100, help="Fetches into an empty store.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast weights come from peers: loopback over TLS, every chunk verified, liars among the sources."""
    from potluck.bench.weights import WeightsBenchSettings, bench_weights
    from potluck.core.paths import locate_folders

    if liars >= sources:
        raise BadRequest(f"{liars} liars among {sources} sources leave nobody to get weights from")
    signal.signal(signal.SIGTERM, _interrupt)  # the nodes are ended on the way out, as after Ctrl-C
    settings = WeightsBenchSettings(model=model, folders=locate_folders(), sources=sources, liars=liars, rounds=rounds)
    report = bench_weights(settings, _ignore if as_json else notice)
    if as_json:
        print_json(report)
    else:
        print_weights(report)


def print_weights(report: "WeightsReport") -> None:
    rows = (
        ("verified bytes into an empty store", f"{report.megabytes_per_s:.0f} MB/s"),
        ("the best round", f"{report.best_megabytes_per_s:.0f} MB/s"),
        ("verifying, share of the time", f"{report.verify_share:.2f} ({report.verify_megabytes_per_s:.0f} MB/s alone)"),
        ("writing, share of the time", f"{report.write_share:.2f}"),
        ("small message at rest, p50", f"{report.round_trip_rest_ms:.2f} ms"),
        (
            "small message during a transfer, p50 / p95",
            f"{report.round_trip_busy_p50_ms:.1f} / {report.round_trip_busy_p95_ms:.1f} ms",
        ),
        ("wrong chunks, all found out", str(report.wrong_chunks)),
    )
    print(
        f"{report.model}, {report.size_bytes / 1e6:.0f} MB from {report.sources} sources, {report.liars} of them lying\n"
    )
    print(format_table(("WHAT", "FIGURE"), rows, (1,)))


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
    return parse_counts(text, "--threads", _MAX_THREADS)


def parse_counts(text: str, option: str, most: int) -> tuple[int, ...]:
    """`1,2` as (1, 2), in ascending order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise BadRequest(f"{option} takes numbers from 1 to {most} with commas between, not {text!r}")
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
