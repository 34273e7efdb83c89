# ruff: noqa: E501, B007
"""One visit to a machine with a GPU: everything that can be learned there, part by part; a part that fails does not stop the next.

Run as `python3 -m tests.device.visit [part …]` with the source folder on the path. Prints tables; JSON goes to $OUT.
"""

import functools
import gc
import itertools
import json
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

OUT = Path(os.environ.get("OUT", "/tmp"))
RESULTS: dict[str, Any] = {}
SHAPES = {
    "7b qkv": (4608, 3584, 0), "7b o": (3584, 3584, 0), "7b gate_up": (37888, 3584, 1), "7b down": (3584, 18944, 0),
    "7b head": (152064, 3584, 0), "3b qkv": (2560, 2048, 0), "3b o": (2048, 2048, 0), "3b gate_up": (22016, 2048, 1),
    "3b down": (2048, 11008, 0), "3b head": (151936, 2048, 0), "llama qkv": (5120, 3072, 0), "llama gate_up": (16384, 3072, 1),
    "llama down": (3072, 8192, 0),
}  # fmt: skip
HAS_NORM = ("qkv", "gate_up", "head")


PARTS = []


def part(function):
    PARTS.append(function)
    return function


def run_part(function) -> None:
    """Runs it, whatever happens."""
    name = function.__name__
    print(f"\n=== {name} [{time.strftime('%H:%M:%S')}]", flush=True)
    start = time.time()
    try:
        function()
    except BaseException as error:
        print(f"!!! {name} FAILED: {type(error).__name__}: {str(error)[:2000]}")
        print("".join(traceback.format_exc().splitlines(keepends=True)[-12:]), flush=True)
    print(f"--- {name}: {time.time() - start:.1f} s", flush=True)
    (OUT / "results.json").write_text(json.dumps(RESULTS, indent=1, default=str))


# ---------------------------------------------------------------- what is measured


def specs() -> list[tuple[str, str, dict]]:
    """(kind, shape, constants) of every cut that is tried."""
    out = []
    for name, (n, k, gated) in SHAPES.items():
        for rows, lanes, split, unroll, warps in itertools.product(
            (1, 2, 4), (16, 32), (1, 2, 4, 8), (1, 2, 4, 8), (4, 8)
        ):
            if split > warps or (lanes == 16 and split > 1):
                continue
            cut = {"ROWS": rows, "LANES": lanes, "SPLIT": split, "UNROLL": unroll, "num_warps": warps}
            runs = lanes * split * unroll
            if 2 <= rows * unroll * (1 + gated) <= 16 and runs * 8 < 1.3 * k:
                out.append(("one", name, cut))
        for rows, lanes, split, unroll, warps in itertools.product(
            (1, 2, 4, 8), (8, 16, 32), (1, 2, 4, 8), (1, 2), (4, 8)
        ):
            if split > warps or (lanes < 32 and split > 1):
                continue
            cut = {"ROWS": rows, "LANES": lanes, "SPLIT": split, "UNROLL": unroll, "num_warps": warps}
            if (
                name.startswith("7b")
                and 2 <= rows * unroll * (1 + gated) <= 8
                and lanes * split * unroll * 32 < 1.3 * k
            ):
                out.append(("one4", name, cut))
    return out


def launch(kind: str, name: str, constants: dict, tensors: dict) -> None:
    import triton

    from potluck.engine.cuda.kernels import block_row, dense_row
    from potluck.engine.cuda.triton_operations import OneRow

    n, k, gated = SHAPES[name]
    rows = n // 2 if gated else n
    cut = OneRow(*constants.values())
    grid = (triton.cdiv(rows, cut.program_rows),)
    has_norm = name.split()[1] in HAS_NORM
    common = {"K": k, "HAS_BIAS": False, "ADDS": not has_norm, "ACTIVATION": gated}
    t = tensors
    if kind == "one":
        dense_row.one_row_kernel[grid](
            t["x"], t["norm"], t["w"], t["x"], t["out"], rows, rows, 1e-6, **common, HAS_NORM=has_norm, EACH=8, **constants
        )  # fmt: skip
    else:
        block_row.one_row_blocks_kernel[grid](
            t["x8"], t["q"], t["s"], t["s"], t["x"], t["out"], rows, rows, **common, GROUP=32, BITS=4, KIND=0, ZERO=8, **constants
        )  # fmt: skip


def compile_only(batch: list[tuple[str, str, dict]]) -> int:
    """In a process of its own, without the GPU: fills the compiler's cache."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Fake:
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

    driver.set_active(Fake())
    real = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **kw: real(self, *args, grid=grid, warmup=True, **kw)
    f, b = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    tensors = {
        "x": f, "norm": f, "out": f, "outs": f, "outs_gated": b, "w": b, "xb": b, "q": torch.zeros(64, dtype=torch.int32),
        "s": torch.zeros(64, dtype=torch.float16), "x8": torch.zeros(64, dtype=torch.int32),
    }  # fmt: skip
    done = 0
    for kind, name, constants in batch:
        try:
            launch(kind, name, constants, tensors)
            done += 1
        except Exception as error:
            print("compile:", kind, name, constants, type(error).__name__, str(error)[:200])
    return done


def graph_seconds(calls, repeats: int = 4) -> float:
    """Per call, from a captured graph of all of them."""
    import torch

    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    from potluck.engine.cuda.ceilings import seconds

    return seconds(graph.replay, repeats) / len(calls)


# ---------------------------------------------------------------- parts


@part
def machine() -> None:
    import torch
    import triton

    from potluck.engine.cuda.ceilings import copy_bandwidth, matrix_rate

    print(
        sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__, torch.cuda.get_device_name()
    )
    print(
        "memory",
        [round(x / 2**30, 1) for x in torch.cuda.mem_get_info()],
        "numpy",
        np.__version__,
        "cores",
        os.cpu_count(),
    )
    device = torch.device("cuda:0")
    RESULTS["bandwidth"], RESULTS["rate"] = copy_bandwidth(device), matrix_rate(device)
    print(f"copy {RESULTS['bandwidth'] / 1e12:.3f} TB/s, bf16 {RESULTS['rate'] / 1e12:.0f} TFLOP/s")
    big = torch.empty(2 << 30, dtype=torch.uint8, device=device).view(torch.int32).random_()
    from potluck.engine.cuda.ceilings import seconds

    print(f"reading alone (torch sum) {big.nbytes / seconds(big.sum, 5) / 1e12:.3f} TB/s")
    torch.cuda.empty_cache()


def run_engine(checkpoint, tokens, **settings):
    from potluck.core.layers import LayerRange
    from potluck.engine.cuda.engine import TorchEngine
    from potluck.engine.shard_engine import EngineSettings, Step

    layers = LayerRange(0, checkpoint.facts.layer_count)
    engine = TorchEngine(checkpoint, EngineSettings(layers=layers, kv_budget_bytes=64 << 20, **settings))
    session = engine.open(len(tokens))
    prompt = len(tokens) - 10
    [first] = engine.forward([Step(session, 0, tokens=tokens[:70], logits=range(70))])
    [second] = engine.forward([Step(session, 70, tokens=tokens[70:prompt], logits=range(prompt - 70))])
    out = [first.logits, second.logits]
    for i in range(prompt, len(tokens)):
        [result] = engine.forward([Step(session, i, tokens=[tokens[i]], logits=[0])])
        out.append(result.logits)
    others = [engine.open(40) for _ in range(5)]
    engine.truncate(session, 30)
    engine.forward([Step(each, 0, tokens=tokens[: 3 + i]) for i, each in enumerate(others)])
    steps = [Step(session, 30, tokens=[tokens[30]], logits=[0])]
    steps += [Step(each, 3 + i, tokens=[tokens[3 + i]], logits=[0]) for i, each in enumerate(others)]
    out += [result.logits for result in engine.forward(steps)]
    engine.close()
    return np.concatenate(out)


def all_cases():
    from tests.support.random_models import FAMILIES, MIXES, WIDE, WIDE_MIXES

    cases = [(f, m) for f in FAMILIES for m in ("F32", "BF16")] + [
        ("llama", "F16"), ("qwen2", "Q4_1"), ("gemma3", "mixed"), ("phi3", "mixed"), ("phi3", "F16"),
    ]  # fmt: skip
    named = {f"{f}/{m}": (FAMILIES[f], MIXES[m]) for f, m in cases} | {
        f"wide/{m}": (WIDE, WIDE_MIXES[m]) for m in WIDE_MIXES
    }
    named |= {f"wide/{m}": (WIDE, m) for m in ("Q8_0", "Q4_0", "Q5_0", "Q5_1")}
    wanted = os.environ.get("CASES", "")
    return {name: case for name, case in named.items() if wanted in name}


def one_case(name: str) -> list[tuple[str, float, str]]:
    """In a process of its own: kernels have to be compiled, and there are many."""
    import torch

    from tests.support.memory_checkpoint import random_checkpoint

    torch.set_num_threads(2)
    checkpoint = random_checkpoint(*all_cases()[name])
    tokens = np.random.default_rng(1).integers(3, 100, 300).tolist()
    wanted = run_engine(checkpoint, tokens, device="cuda:torch-cpu")
    lines = []
    for invariant in (False, True):
        try:
            got = run_engine(checkpoint, tokens, device="cuda", is_batch_invariant=invariant)
            d = np.abs(got - wanted) / np.abs(wanted).max()
            parts = (
                f"chunk {d[:290].max():.1e} rows {d[290:300].max():.1e} batch {d[300:].max():.1e} mean {d.mean():.1e}"
            )
            lines.append((f"{name} inv={invariant}", float(d.max()), parts))
        except Exception as error:
            where = "".join(traceback.format_exc().splitlines(keepends=True)[-4:])
            lines.append(
                (f"{name} inv={invariant}", float("inf"), f"{type(error).__name__}: {str(error)[:500]} {where}")
            )
    return lines


@part
def correctness() -> None:
    """Kernels beside the plain form on the CPU: all families, all formats."""
    worst = {}
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        for lines in pool.map(one_case, all_cases()):
            for name, largest, text in lines:
                worst[name] = largest
                limit = 1e-4 if "/F32" in name else 6e-2
                if not largest < limit or name.startswith(("wide", "qwen2")):
                    print("" if largest < limit else "LARGE", name, text, flush=True)
    RESULTS["correctness"] = worst
    for what in ("/F32", "/BF16", "/F16", "Q"):
        chosen = {k: v for k, v in worst.items() if what in k}
        print(what, "worst", max(chosen.items(), key=lambda item: item[1], default=None), "of", len(chosen))


@part
def sweep() -> None:
    import torch

    everything = [spec for spec in specs() if spec[0] in os.environ.get("SWEEP", "one one4").split()]
    print(len(everything), "cuts")
    start = time.time()
    order = sorted(range(len(everything)), key=lambda i: i % 97)
    batches = [[everything[i] for i in order[j::28]] for j in range(28)]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        print("compiled", sum(pool.map(compile_only, batches)), f"in {time.time() - start:.0f} s", flush=True)
    device = torch.device("cuda:0")
    best: dict[tuple, list] = {}
    for name, (n, k, gated) in SHAPES.items():
        count = max(1, min(24, (400 << 20) // (n * k * 2)))
        weights = [torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(0, k**-0.5) for _ in range(count)]
        count4 = max(1, min(24, (400 << 20) // (n * k // 2)))
        quants = [
            torch.randint(-(2**31), 2**31, (n, k // 8), dtype=torch.int32, device=device) for _ in range(count4)
        ] if name.startswith("7b") else []  # fmt: skip
        scales = torch.full((n, k // 32), k**-0.5 / 4.6, dtype=torch.float16, device=device)
        fixed = {
            "x": torch.randn(32, k, device=device), "norm": torch.ones(k, device=device), "out": torch.zeros(1, n, device=device),
            "outs": torch.zeros(32, n, device=device), "outs_gated": torch.zeros(32, n, device=device, dtype=torch.bfloat16),
            "xb": torch.randn(32, k, device=device).bfloat16(), "s": scales,
            "x8": torch.randint(-(2**31), 2**31, (k // 4 + k // 16,), dtype=torch.int32, device=device),
        }  # fmt: skip
        for kind, which, constants in everything:
            if which != name:
                continue
            holders = [{**fixed, "w": w} for w in weights] if kind == "one" else [{**fixed, "q": q} for q in quants]
            size = n * k * 2 if kind == "one" else n * k // 2 + n * k // 16
            repeats = max(1, 12 // len(holders))
            try:
                took = graph_seconds([functools.partial(launch, kind, name, constants, h) for h in holders * repeats])
            except Exception as error:
                print("failed", kind, name, constants, type(error).__name__, str(error)[:120])
                continue
            best.setdefault((kind, name), []).append((took, size / took / 1e12, constants))
        del weights, quants
    table = {}
    for (kind, name), rows in best.items():
        rows.sort(key=lambda row: row[0])
        table[f"{kind}/{name}"] = [(round(t * 1e6, 2), round(bw, 3), c) for t, bw, c in rows[:6]]
        t, bw, c = rows[0]
        cut = " ".join(f"{a}={v}" for a, v in c.items())
        second = " ".join(f"{v}" for a, v in rows[min(1, len(rows) - 1)][2].items())
        print(
            f"{kind:5} {name:11} {t * 1e6:7.1f} us {bw:.2f} TB/s  {cut}   (next {rows[min(1, len(rows) - 1)][0] * 1e6:.1f}: {second}; worst {rows[-1][0] * 1e6:.0f}, {len(rows)} cuts)"
        )
    RESULTS["sweep"] = table


def tuned(tuning) -> None:
    """Puts the sweep's winners in."""
    from potluck.engine.cuda.triton_operations import OneRow

    for key, rows in RESULTS.get("sweep", {}).items():
        kind, name = key.split("/")
        n, k, gated = SHAPES[name]
        table = tuning.one_row if kind == "one" else tuning.one_row_blocks
        table[(n, k, bool(gated))] = OneRow(*rows[0][2].values())


def warm(arguments) -> str:
    """In a process of its own: one layer of a model through everything that the figures need, which compiles its kernels."""
    shape, fmt, mode, results = arguments
    import msgspec

    from potluck.bench import cuda_engine as bench
    from potluck.weights.random_checkpoint import RANDOM_MODELS, RandomCheckpoint

    RESULTS.update(results)
    try:
        facts = msgspec.structs.replace(RANDOM_MODELS[shape], layer_count=1)
        engine = bench.open_engine(RandomCheckpoint(facts, fmt, 1), bench.CudaBenchSettings(kv_budget_bytes=1 << 30))
        set_mode(engine, mode)
        for streams, prompt in ((1, 128), (32, 128), (1, 4096)):
            bench.decode_speed(engine, streams, prompt, 2)
        return ""
    except Exception as error:
        return f"warm {shape} {fmt} {mode}: {type(error).__name__}: {str(error)[:300]}"


def set_mode(engine, mode: str) -> None:
    if mode.startswith("tuned"):
        tuned(engine.operations.tuning)


MODES = [
    ("qwen2.5-7b", "BF16", "default"), ("qwen2.5-7b", "Q4_0", "default"), ("qwen2.5-7b", "Q4_0", "tuned"),
    ("qwen2.5-7b", "Q4_K", "tuned"), ("qwen2.5-3b", "BF16", "default"),
]  # fmt: skip


def graph_only(engine, streams: int, prompt: int) -> float:
    """Milliseconds of the captured graph alone, without the host."""
    import torch

    from potluck.bench.cuda_engine import _prefilled, _prompt, _step

    sessions = [engine.open(prompt + 40) for _ in range(streams)]
    tokens = [_prefilled(engine, s, _prompt(engine.facts, prompt, i)) for i, s in enumerate(sessions)]
    tokens = _step(engine, sessions, tokens)
    key = next(k for k in engine._rows._graphs if k.bucket >= streams and k.head == "likeliest")
    graph = engine._rows._graphs[key]
    from potluck.engine.cuda.ceilings import seconds

    took = seconds(graph.replay, 20)
    for s in sessions:
        engine.close_session(s)
    torch.cuda.synchronize()
    return took * 1000


@part
def engines() -> None:
    """Speeds of whole models: default cuts, then the sweep's winners, then with dependent launches."""
    import torch

    from potluck.bench import cuda_engine as bench
    from potluck.weights.random_checkpoint import open_random, random_name

    bandwidth, rate = RESULTS.get("bandwidth", 4.28e12), RESULTS.get("rate", 7.9e14)
    settings = bench.CudaBenchSettings(rounds=3)
    start = time.time()
    with ProcessPoolExecutor(10, mp_context=get_context("spawn")) as pool:
        for text in pool.map(warm, [(*mode, RESULTS) for mode in MODES]):
            print(text, end="\n" if text else "")
    print(f"kernels of all modes compiled in {time.time() - start:.0f} s", flush=True)
    for shape, fmt, mode in MODES:
        try:
            start = time.time()
            checkpoint = open_random(random_name(shape, fmt))
            engine = bench.open_engine(checkpoint, settings)
            loaded = time.time() - start
            set_mode(engine, mode)
            size = bench.bytes_per_token(checkpoint)
            one = max(bench.decode_speed(engine, 1, 128, 64) for _ in range(3))
            line = f"{shape:13} {fmt:5} {mode:10} one {one:6.1f} tok/s = {one * size / bandwidth:.1%}, graph alone {graph_only(engine, 1, 128):.3f} ms"
            RESULTS[f"engine {shape} {fmt} {mode} one"] = one
            if mode:
                many = max(bench.decode_speed(engine, 32, 128, 48) for _ in range(2))
                deep = bench.decode_speed(engine, 1, 4096, 48)
                prefill = max(bench.prefill_speed(engine, 4096) for _ in range(3))
                share = prefill * bench.prefill_operations(checkpoint.facts, 4096) / 4096 / rate
                line += f", 32 streams {many:.0f} = {many / one:.1f}x (graph {graph_only(engine, 32, 128):.3f} ms), at 4096 {deep:.0f}, prefill {prefill:.0f} tok/s = {share:.1%}, load {loaded:.1f} s"
                RESULTS[f"engine {shape} {fmt} {mode} more"] = (many, deep, prefill, share)
            print(line, flush=True)
            if fmt in ("BF16", "Q4_0"):
                profile(engine, shape, fmt)
        except Exception as error:
            print(f"FAILED {shape} {fmt} {mode}: {type(error).__name__}: {str(error)[:800]}")
            print("".join(traceback.format_exc().splitlines(keepends=True)[-6:]), flush=True)
        finally:
            engine = None
            gc.collect()
            torch.cuda.empty_cache()


def profile(engine, shape: str, fmt: str) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    from potluck.bench.cuda_engine import _prefilled, _prompt, _step, prefill_speed

    for what in ("one", "32"):
        sessions = [engine.open(200) for _ in range(32 if what == "32" else 1)]
        tokens = [_prefilled(engine, s, _prompt(engine.facts, 100, i)) for i, s in enumerate(sessions)]
        tokens = _step(engine, sessions, tokens)
        with torch_profile(activities=[ProfilerActivity.CUDA]) as prof:
            if what == "prefill":
                prefill_speed(engine, 4096)
            else:
                _step(engine, sessions, tokens)
        for s in sessions:
            engine.close_session(s)
        events = sorted(prof.key_averages(), key=lambda e: -e.device_time_total)
        total = sum(e.device_time_total for e in events)
        shown = ", ".join(f"{e.key[:34]} {e.count}x{e.device_time_total / max(1, e.count):.1f}" for e in events[:12])
        print(f"    {what}: kernels {total / 1000:.3f} ms in {sum(e.count for e in events)}: {shown}", flush=True)


def company_of(arguments) -> str:
    """Bits of one session alone and in company."""
    import msgspec

    from potluck.core.layers import LayerRange
    from potluck.engine.cuda.engine import TorchEngine
    from potluck.engine.shard_engine import EngineSettings, Step
    from potluck.weights.random_checkpoint import RANDOM_MODELS, RandomCheckpoint

    facts = msgspec.structs.replace(RANDOM_MODELS["qwen2.5-7b"], layer_count=3, vocabulary_size=8192)
    for fmt, promised in [arguments]:
        for _ in range(1):
            engine = TorchEngine(
                RandomCheckpoint(facts, fmt, 1),
                EngineSettings(
                    layers=LayerRange(0, 3), device="cuda", is_batch_invariant=promised, kv_budget_bytes=2 << 30
                ),
            )
            seen = {}
            for company in (0, 1, 3, 7, 8, 15, 20, 31, 50, 63):
                session, others = engine.open(700), [engine.open(700) for _ in range(company)]
                engine.forward([Step(session, 0, tokens=range(300))])
                for i, other in enumerate(others):
                    engine.forward([Step(other, 0, tokens=range(i, i + 10 + 8 * (i % 60)))])
                out = []
                for i in range(3):
                    steps = [
                        Step(each, engine.length(each), tokens=[i + 7], logits=[0])
                        for each in (*others[: company // 2], session, *others[company // 2 :])
                    ]
                    out.append(engine.forward(steps)[company // 2].logits)
                seen[company + 1] = np.concatenate(out)
                for each in (session, *others):
                    engine.close_session(each)
            base = seen[1]
            same = {n: bool((v == base).all()) for n, v in seen.items()}
            worst = max(float(np.abs(v - base).max()) for v in seen.values())
            two = {n: bool((v == seen[2]).all()) for n, v in seen.items() if n > 1}
            engine.close()
            return f"{fmt} promised={promised}: same bits as alone {same}, all as with two {two}, largest difference {worst:.2e} of {np.abs(base).max():.1f}"
    return ""


@part
def invariance() -> None:
    cases = [(fmt, promised) for fmt in ("BF16", "Q4_0", "Q4_K", "Q8_0") for promised in (True, False)]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        for text in pool.map(company_of, cases):
            print(text, flush=True)


def parity_of(case: str) -> str:
    """One family on the GPU: prompt in chunks, decoding, whole and cut, against transformers in float32 on the same GPU."""
    import tempfile

    import torch

    from potluck.weights.open_model import open_checkpoint
    from tests.support.pipelines import pipeline_of
    from tests.support.transformers_models import random_model, relative_difference, save

    try:
        tokens = np.random.default_rng(1).integers(3, 300, 140).tolist()
        model = random_model(case).cuda()
        with torch.no_grad():
            wanted = model(torch.tensor([tokens]).cuda(), use_cache=False).logits[0].float().cpu().numpy()
        found = []
        with (
            tempfile.TemporaryDirectory() as folder,
            open_checkpoint(save(model.cpu(), Path(folder) / "model")) as checkpoint,
        ):
            for cuts in ((), (1,), tuple(range(1, checkpoint.facts.layer_count))):
                for chunks in ([140], [50, 78] + [1] * 12):
                    pipeline = pipeline_of(checkpoint, cuts, device="cuda", kv_budget_bytes=64 << 20)
                    found.append(relative_difference(pipeline.run(tokens, chunks).logits, wanted))
                    pipeline.close()
        return f"{'' if max(found) < 1e-4 else 'LARGE '}{case}: {max(found):.1e} ({len(found)} runs)"
    except Exception as error:
        return f"FAILED {case}: {type(error).__name__}: {str(error)[:300]} {''.join(traceback.format_exc().splitlines(keepends=True)[-3:])}"


@part
def parity() -> None:
    """Tiny models of all families, then a 3B shape layer by layer, beside transformers on the GPU."""
    from tests.support.family_configs import CASES

    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        lines = list(pool.map(parity_of, CASES))
    print("\n".join(lines), flush=True)
    RESULTS["parity"] = lines
    layer_by_layer()


def layer_by_layer() -> None:
    import tempfile

    import torch
    import transformers

    from potluck.engine.shard_engine import Step
    from potluck.weights.open_model import open_checkpoint
    from tests.support.pipelines import shard_of

    config = transformers.Qwen2Config(
        vocab_size=8192, hidden_size=2048, intermediate_size=11008, num_hidden_layers=6, num_attention_heads=16,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
    tokens = np.random.default_rng(1).integers(0, 8192, 512).tolist()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # Read again: `.to(bfloat16)` has rounded the rotation's frequencies too.
        model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
        with torch.no_grad():
            seen = model.model(torch.tensor([tokens]).cuda(), output_hidden_states=True, use_cache=False).hidden_states
        hidden = [each[0].float().cpu().numpy() for each in seen]
        worst = 0.0
        with open_checkpoint(Path(folder)) as checkpoint:
            for layer in range(5):
                engine = shard_of(
                    checkpoint, layer, layer + 1, device="cuda", has_embedding=False, kv_budget_bytes=64 << 20
                )
                session = engine.open(512)
                got = [engine.forward([Step(session, 0, hidden=hidden[layer][:500])])[0].hidden]
                got += [
                    engine.forward([Step(session, i, hidden=hidden[layer][i : i + 1])])[0].hidden
                    for i in range(500, 512)
                ]
                error = np.concatenate(got) - hidden[layer + 1]
                change = hidden[layer + 1] - hidden[layer]
                worst = max(worst, float(np.linalg.norm(error) / np.linalg.norm(change)))
                print(
                    f"3B shape, layer {layer}: |error| / |what the layer adds| = {np.linalg.norm(error) / np.linalg.norm(change):.1e}"
                )
                engine.close()
    RESULTS["layer by layer"] = worst


@part
def pipeline() -> None:
    from potluck.bench.cuda_pipeline import CudaPipelineSettings, as_lines, bench_cuda_pipeline

    figures = bench_cuda_pipeline(CudaPipelineSettings(), print)
    print("\n".join(as_lines(figures)), flush=True)
    RESULTS["pipeline"] = [str(each) for each in figures]


def taking_turns(arguments) -> list[float]:
    """In a process of its own: half of a 3B model's layers, run whenever the shared counter says that it is this one's turn."""
    number, name, rounds = arguments
    from multiprocessing.shared_memory import SharedMemory

    import torch

    from potluck.core.layers import LayerRange
    from potluck.engine.cuda.engine import TorchEngine
    from potluck.engine.shard_engine import EngineSettings
    from potluck.weights.random_checkpoint import open_random, random_name

    settings = EngineSettings(
        layers=LayerRange(18, 36), has_embedding=False, has_output=False, device="cuda", kv_budget_bytes=1 << 30
    )
    engine = TorchEngine(open_random(random_name("qwen2.5-3b", "BF16")), settings)
    session = engine.open(64)
    from potluck.engine.shard_engine import Step

    engine.forward([Step(session, 0, hidden=np.ones((1, 2048), np.float32))])
    [graph] = engine._rows._graphs.values()
    stream = torch.cuda.current_stream()
    memory = SharedMemory(name)
    turn = np.ndarray((4,), np.int64, memory.buf)
    alone = []
    for _ in range(200):
        began = time.perf_counter()
        graph.replay()
        stream.synchronize()
        alone.append(time.perf_counter() - began)
    turn[2 + number] = 1
    while turn[2] + turn[3] < 2:
        time.sleep(0.001)
    took = []
    for _ in range(rounds):
        while turn[0] % 2 != number:
            pass
        began = time.perf_counter()
        graph.replay()
        stream.synchronize()
        took.append(time.perf_counter() - began)
        turn[0] += 1
    del turn
    memory.close()
    return [float(np.median(alone)) * 1e6, float(np.median(took)) * 1e6]


@part
def switching() -> None:
    """What two processes that take turns on one GPU lose to each other, without anything between them."""
    from multiprocessing.shared_memory import SharedMemory

    memory = SharedMemory(create=True, size=64)
    np.ndarray((8,), np.int64, memory.buf)[:] = 0
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for alone, turns in pool.map(taking_turns, [(0, memory.name, 500), (1, memory.name, 500)]):
            print(f"half of a 3B model: alone {alone:.0f} us, in turns {turns:.0f} us", flush=True)
    memory.close()
    memory.unlink()


def mps(command: str) -> str:
    import subprocess

    done = subprocess.run(
        ["nvidia-cuda-mps-control"], check=False, input=command + "\n", capture_output=True, text=True, timeout=20
    )
    return (done.stdout + done.stderr).strip()


@part
def with_mps() -> None:
    """The same two with NVIDIA's multi-process service, which lets processes share the GPU without switching."""
    import subprocess

    started = subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False, capture_output=True, text=True, timeout=20)
    print("mps started:", started.returncode, started.stdout, started.stderr)
    try:
        switching()
        print("servers:", mps("get_server_list"))
        pipeline()
        print("servers:", mps("get_server_list"))
    finally:
        print("mps ended:", mps("quit -f"))


@part
def memory() -> None:
    import torch

    from potluck.bench import cuda_engine as bench
    from potluck.core.errors import OutOfDeviceMemory
    from potluck.weights.random_checkpoint import open_random, random_name

    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    checkpoint = open_random(random_name("qwen2.5-3b", "BF16"))
    engine = bench.open_engine(checkpoint, bench.CudaBenchSettings())
    bench.decode_speed(engine, 2, 100, 4)
    taken = free - torch.cuda.mem_get_info()[0]
    engine.close()
    print(f"3b: taken {taken >> 20} MiB, still taken after close {(free - torch.cuda.mem_get_info()[0]) >> 20} MiB")
    hog = torch.empty(int(torch.cuda.mem_get_info()[0] - (5 << 30)), dtype=torch.uint8, device="cuda")
    try:
        bench.open_engine(checkpoint, bench.CudaBenchSettings())
        print("!!! loaded into a full GPU")
    except OutOfDeviceMemory as error:
        print("refused as it should be:", error)
    del hog
    torch.cuda.empty_cache()


if __name__ == "__main__":
    for each in PARTS:
        if len(sys.argv) == 1 or each.__name__ in sys.argv[1:]:
            run_part(each)
    print("\nall parts done", flush=True)
