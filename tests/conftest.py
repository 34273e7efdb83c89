"""Fixtures for all tests, and what all of them share: one store of models, one folder of compiled kernels."""

import os
from pathlib import Path

import pytest

HOME = Path(os.environ.get("POTLUCK_TEST_HOME") or Path.home() / ".cache" / "potluck-tests")
# Before anything of the engine is imported: this process and every node that it starts compile a kernel once between them.
os.environ.setdefault("POTLUCK_CACHE", str(HOME / "cache"))

from potluck.core.errors import ModelNotFound  # noqa: E402 - after the place of the kernels is known
from potluck.weights.catalogue import DEFAULT_MODEL_ID  # noqa: E402
from potluck.weights.pull import Puller  # noqa: E402
from potluck.weights.store import ModelStore  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("POTLUCK_LONG"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="runs in `make test-long`"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, pulled once per machine; POTLUCK_TEST_HOME says where to."""
    store = ModelStore(HOME / "models")
    try:
        return store.path(DEFAULT_MODEL_ID)
    except ModelNotFound:
        Puller(store).pull(DEFAULT_MODEL_ID)
        return store.path(DEFAULT_MODEL_ID)


@pytest.fixture(scope="session")
def models_home(smollm2_path: Path) -> Path:
    """What POTLUCK_HOME is for nodes in tests: the default model is in its store, and kernels compiled once stay there."""
    return smollm2_path.parents[2]
