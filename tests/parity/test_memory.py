"""Resident size of a worker process: at most 1.2 × its tensors' bytes in the file + KV in use + 250 MB."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.large_gguf import write_large_gguf

ROOT = Path(__file__).parents[2]
MEGABYTE = 1_000_000


def report_of(path: Path, cache_folder: Path, layers: tuple[int, int]) -> dict[str, int]:
    arguments = [str(path), str(cache_folder), *map(str, layers)]
    command = [sys.executable, "-m", "tests.support.memory_worker", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


def assert_within_limit(report: dict[str, int]) -> None:
    limit = 1.2 * report["tensor_bytes"] + report["kv_bytes"] + 250 * MEGABYTE
    shown = {name: f"{size / MEGABYTE:.0f} MB" for name, size in report.items()}
    assert report["resident_bytes"] <= limit, f"{shown}, limit {limit / MEGABYTE:.0f} MB"


@pytest.fixture(scope="module")
def large_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large_gguf(tmp_path_factory.mktemp("large") / "large.gguf")


@pytest.fixture(scope="module")
def warm_folder(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    report_of(smollm2_path, folder, (0, 30))
    return folder


@pytest.fixture(scope="module")
def warm_large_folder(large_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    report_of(large_path, folder, (0, 8))
    return folder


@pytest.mark.parametrize("layers", [(0, 30), (0, 15), (15, 30), (10, 12)])
def test_a_worker_of_smollm2_stays_within_its_limit(
    smollm2_path: Path, warm_folder: Path, layers: tuple[int, int]
) -> None:
    assert_within_limit(report_of(smollm2_path, warm_folder, layers))


@pytest.mark.parametrize("layers", [(0, 8), (2, 6)])
def test_a_worker_of_a_larger_model_stays_within_its_limit(
    large_path: Path, warm_large_folder: Path, layers: tuple[int, int]
) -> None:
    assert_within_limit(report_of(large_path, warm_large_folder, layers))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
@pytest.mark.parametrize("layers", [(10, 12), (0, 30)])
def test_of_files_only_what_is_used_stays_mapped(
    smollm2_path: Path, warm_folder: Path, tmp_path: Path, layers: tuple[int, int]
) -> None:
    """A file that was read in one go lies in large pieces in the system's cache, and a touch maps all of a piece.

    This is what a fresh machine has: nearly the whole model and the whole compiler, tens of megabytes more than the worker needs.
    """
    path = tmp_path / "model.gguf"
    path.write_bytes(smollm2_path.read_bytes())
    read_in_one_go(path)
    report = report_of(path, warm_folder, layers)
    embedding_bytes = 30 * MEGABYTE if layers[0] == 0 else 0
    assert report["file_bytes"] <= embedding_bytes + 2 * MEGABYTE
    assert report["compiler_bytes"] <= 4 * MEGABYTE


def read_in_one_go(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while file.read(4 << 20):
            pass


def test_weights_are_held_once(large_path: Path, warm_large_folder: Path) -> None:
    """From two layers to six the worker grows by four layers' bytes, and not by a second copy of anything."""
    small, large = (report_of(large_path, warm_large_folder, layers) for layers in ((1, 3), (1, 7)))
    grown = own_bytes(large) - own_bytes(small)
    assert grown <= 1.2 * (large["tensor_bytes"] - small["tensor_bytes"])


def own_bytes(report: dict[str, int]) -> int:
    return report["resident_bytes"] - report["kv_bytes"] - report["compiler_bytes"]


def test_packing_for_the_first_time_needs_no_more(large_path: Path, tmp_path: Path) -> None:
    assert_within_limit(report_of(large_path, tmp_path, (0, 8)))
