"""A Checkpoint whose tensors lie in memory: any facts, any mix of formats, no file."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from potluck.core.model_facts import ModelFacts
from potluck.core.tokenizer_spec import TokenizerSpec
from potluck.weights.checkpoint import TensorEntry
from potluck.weights.expected_tensors import expected_tensors
from tests.support.random_weights import Bytes, float_weights, random_weights


class MemoryCheckpoint:
    """Implements `potluck.weights.checkpoint.Checkpoint`."""

    def __init__(self, facts: ModelFacts | None = None) -> None:
        self._facts = facts
        self._data: dict[str, Bytes] = {}
        self._tensors: dict[str, TensorEntry] = {}

    def put(self, name: str, format_name: str, shape: tuple[int, ...], data: Bytes) -> None:
        flat = np.ascontiguousarray(data).reshape(-1)
        self._data[name] = flat
        self._tensors[name] = TensorEntry(name, name, format_name, shape, Path("memory"), 0, len(flat))  # type: ignore[arg-type]

    @property
    def facts(self) -> ModelFacts:
        assert self._facts is not None
        return self._facts

    @property
    def tokenizer(self) -> TokenizerSpec | None:
        return None

    @property
    def tensors(self) -> Mapping[str, TensorEntry]:
        return self._tensors

    def read(self, name: str) -> memoryview:
        return memoryview(self._data[name])

    def forget(self, name: str) -> None:
        """Nothing is mapped here."""

    def forget_all(self) -> None:
        """Nor here."""

    def close(self) -> None:
        pass


def matrix_checkpoint(format_name: str, raw: Bytes, columns: int, name: str = "matrix") -> MemoryCheckpoint:
    """One matrix and no facts."""
    checkpoint = MemoryCheckpoint()
    checkpoint.put(name, format_name, (len(raw), columns), raw)
    return checkpoint


def random_checkpoint(facts: ModelFacts, formats: Mapping[str, str] | str = "F32", seed: int = 0) -> MemoryCheckpoint:
    """All tensors that `facts` call for. `formats`: one for all matrices, or by role, with "" for the others."""
    rng = np.random.default_rng(seed)
    checkpoint = MemoryCheckpoint(facts)
    for name, shape in expected_tensors(facts).items():
        role = name.rpartition(".")[2]
        if len(shape) == 1:
            checkpoint.put(name, "F32", shape, float_weights("F32", _random_vector(rng, role, shape[0], facts)))
            continue
        format_name = formats if isinstance(formats, str) else formats.get(role, formats[""])
        reach = 4.0 if role == "embedding" else 3.0 / np.sqrt(shape[1])
        checkpoint.put(name, format_name, shape, random_weights(rng, format_name, *shape, reach))
    return checkpoint


def _random_vector(rng: np.random.Generator, role: str, count: int, facts: ModelFacts) -> npt.NDArray[np.float32]:
    values = rng.standard_normal(count) * 0.3
    is_centred = role.endswith("bias") or facts.norm_weight_plus_one
    return (values if is_centred else values + 1.0).astype(np.float32)
