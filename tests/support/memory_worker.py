"""A worker process for tests of memory: loads a shard, runs some steps, and prints what it holds as one JSON object."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from potluck.core.layers import LayerRange
from potluck.engine.cpu_engine import CpuEngine, EngineSettings, Step
from potluck.engine.threads import Governor
from potluck.weights.open_model import open_checkpoint
from potluck.worker.loaded_stages import warm_up


def main(path: str, cache_folder: str, start: int, stop: int) -> None:
    checkpoint = open_checkpoint(Path(path))
    facts = checkpoint.facts
    settings = EngineSettings(
        layers=LayerRange(start, stop), has_embedding=start == 0, has_output=stop == facts.layer_count, threads=2,
        cache_folder=Path(cache_folder), source="test",
    )  # fmt: skip
    before = psutil.Process().memory_info().rss
    engine = CpuEngine(checkpoint, settings)
    warm_up(engine)
    session = engine.open(400)
    rng = np.random.default_rng(0)
    for count in (300, 1, 1, 1, 8):
        if count == 8:  # as on a machine that has become busy
            engine._governor = Governor(1, lambda: None, time.monotonic)
        tokens = rng.integers(0, facts.vocabulary_size, count).tolist()
        hidden = rng.standard_normal((count, facts.hidden_size)).astype(np.float32)
        given = {"tokens": tokens} if start == 0 else {"hidden": hidden}
        wanted = [count - 1] if stop == facts.layer_count else []
        engine.forward([Step(session, engine.length(session), **given, logits=wanted)])
    report = {
        "before_bytes": before,
        "resident_bytes": psutil.Process().memory_info().rss,
        "compiler_bytes": mapped_bytes("libllvmlite"),
        "file_bytes": mapped_bytes(path),
        "kv_bytes": engine.kv.used_bytes,
        "tensor_bytes": tensor_bytes(checkpoint, start, stop),
    }
    print(json.dumps(report))


def mapped_bytes(file: str) -> int:
    """What is resident of a file: as much as the system found handy to map, which depends on how it had read the file before."""
    maps = psutil.Process().memory_maps() if hasattr(psutil.Process, "memory_maps") else []
    return sum(each.rss for each in maps if file in each.path)


def tensor_bytes(checkpoint: object, start: int, stop: int) -> int:
    """What the shard's tensors take in the file."""
    facts, tensors = checkpoint.facts, checkpoint.tensors  # type: ignore[attr-defined]
    names = {name for name in tensors if name.startswith("layers.") and start <= int(name.split(".")[1]) < stop}
    if start == 0:
        names.add("embedding")
    if stop == facts.layer_count:
        names |= {"output_norm", "embedding" if facts.is_output_tied else "output"}
    return sum(tensors[name].size_bytes for name in names)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
