"""Fixtures for all tests."""

import os
from pathlib import Path

import pytest

from potluck.core.errors import ModelNotFound
from potluck.weights.catalogue import DEFAULT_MODEL_ID
from potluck.weights.pull import Puller
from potluck.weights.store import ModelStore


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's GGUF file, pulled once per machine; POTLUCK_TEST_HOME says where to."""
    home = Path(os.environ.get("POTLUCK_TEST_HOME") or Path.home() / ".cache" / "potluck-tests")
    store = ModelStore(home / "models")
    try:
        return store.path(DEFAULT_MODEL_ID)
    except ModelNotFound:
        Puller(store).pull(DEFAULT_MODEL_ID)
        return store.path(DEFAULT_MODEL_ID)


@pytest.fixture(scope="session")
def models_home(smollm2_path: Path) -> Path:
    """What POTLUCK_HOME is for nodes in tests: the default model is in its store, and kernels compiled once stay there."""
    return smollm2_path.parents[2]
