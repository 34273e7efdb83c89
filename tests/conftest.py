"""Fixtures for all tests, and what all of them share: one store of models, one folder of compiled kernels."""

import gc
import os
from pathlib import Path

import pytest

from potluck.core.errors import ModelNotFound
from potluck.weights.catalogue import DEFAULT_MODEL_ID
from potluck.weights.pull import Puller
from potluck.weights.store import ModelStore
from tests.support.places import HOME, alone, share_kernels

share_kernels()  # before anything of the engine is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers side by side have a core each; torch's further threads would only wait for each other in circles.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where whole files go to whoever is free, these begin: none of them should be what everybody waits for in the end.
LONGEST_FILES = (
    "chaos/test_real_processes.py", "cluster/test_swarm.py", "browser/test_real_swarm.py", "cluster/test_wheel.py",
    "cluster/test_swarm_hosts.py", "chaos/test_membership.py", "chaos/test_simulation.py", "parity/test_llama_cpp.py",
    "parity/test_memory.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))
    for item in items:
        if item.get_closest_marker("long") and not os.environ.get("POTLUCK_LONG"):
            item.add_marker(pytest.mark.skip(reason="runs in `make test-long`"))


def pytest_collection_finish() -> None:
    """All that was imported and collected stays: a test that collects garbage need not look through torch again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, pulled once per machine; POTLUCK_TEST_HOME says where to."""
    store = ModelStore(HOME / "models")
    with alone("models"):
        try:
            return store.path(DEFAULT_MODEL_ID)
        except ModelNotFound:
            Puller(store).pull(DEFAULT_MODEL_ID)
            return store.path(DEFAULT_MODEL_ID)


@pytest.fixture(scope="session")
def models_home(smollm2_path: Path) -> Path:
    """What POTLUCK_HOME is for nodes in tests: the default model is in its store, and kernels compiled once stay there."""
    return smollm2_path.parents[2]
