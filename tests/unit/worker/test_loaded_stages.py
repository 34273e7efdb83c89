"""A copy of the weights that computes no numbers is the machine's own fault: told when it is loaded, and never as the asker's."""

import numpy as np
import pytest

from potluck.core.errors import WeightsMismatch
from potluck.core.sampling_params import SamplingParams
from potluck.engine.sampling import choose
from potluck.worker.loaded_stages import warm_up
from tests.support.memory_checkpoint import MemoryCheckpoint, random_checkpoint
from tests.support.pipelines import shard_of
from tests.support.random_models import facts_of

FACTS = facts_of(context_length=200, vocabulary_size=50)


def damaged(name: str) -> MemoryCheckpoint:
    checkpoint = random_checkpoint(FACTS)
    entry = checkpoint.tensors[name]
    values = np.frombuffer(checkpoint.read(name), np.float32).copy()
    values[:] = np.nan
    checkpoint.put(name, entry.format, entry.shape, values.view(np.uint8))
    return checkpoint


@pytest.mark.parametrize(
    ("start", "stop", "name"), [(0, 3, "layers.2.down"), (0, 1, "layers.0.down"), (1, 2, "layers.1.attention_norm")]
)
def test_a_damaged_copy_is_found_when_it_is_loaded(start: int, stop: int, name: str) -> None:
    for checkpoint, is_sound in ((damaged(name), False), (random_checkpoint(FACTS), True)):
        engine = shard_of(checkpoint, start, stop, kv_budget_bytes=64 << 20)
        try:
            if is_sound:
                assert warm_up(engine) > 0
                continue
            with pytest.raises(WeightsMismatch, match="copy of the weights is damaged"):
                warm_up(engine)
        finally:
            engine.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_no_fault_of_the_request(temperature: float) -> None:
    logits = np.zeros(50, np.float32)
    logits[7] = np.nan
    with pytest.raises(WeightsMismatch):
        choose(logits, SamplingParams(temperature=temperature))
