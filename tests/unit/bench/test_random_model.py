"""Random models at a tiny shape: two readers agree on what was written, and the weights are of a sane size."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from potluck.bench.gguf_writer import file_bytes
from potluck.bench.random_model import (
    RandomFormat,
    RandomShape,
    model_metadata,
    planned_tensors,
    random_model,
    recipe_name,
    require_room,
)
from potluck.core.errors import BenchmarkFailed
from potluck.engine.formats import dequantise_rows
from potluck.weights.open_model import open_checkpoint

TINY = RandomShape(
    name="random-tiny",
    hidden_size=256,
    layer_count=2,
    head_count=2,
    kv_head_count=1,
    feed_forward_size=512,
    vocabulary_size=320,
    context_length=64,
)


def make(folder: Path, format_name: RandomFormat) -> Path:
    return random_model(folder, TINY, format_name, lambda _: None)


@pytest.mark.parametrize("format_name", ["Q4_0", "Q4_K"])
def test_our_reader_opens_it(tmp_path: Path, format_name: RandomFormat) -> None:
    path = make(tmp_path, format_name)
    with open_checkpoint(path) as checkpoint:
        facts = checkpoint.facts
        assert (facts.architecture, facts.layer_count, facts.hidden_size, facts.head_size) == ("llama", 2, 256, 128)
        assert (facts.feed_forward_size, facts.kv_head_count, facts.vocabulary_size) == (512, 1, 320)
        assert not facts.is_output_tied
        assert checkpoint.tokenizer is not None
        assert checkpoint.tokenizer.bos_id == 1
        assert checkpoint.tensors["layers.1.down"].format == format_name
    assert path.stat().st_size == file_bytes(model_metadata(TINY), planned_tensors(TINY, format_name))


@pytest.mark.parametrize("format_name", ["Q4_0", "Q4_K"])
def test_the_weights_keep_a_vector_about_as_large_as_it_was(tmp_path: Path, format_name: RandomFormat) -> None:
    with open_checkpoint(make(tmp_path, format_name)) as checkpoint:
        entry = checkpoint.tensors["layers.0.down"]
        data = np.frombuffer(checkpoint.read(entry.name), np.uint8).reshape(entry.shape[0], -1).copy()
    weights = dequantise_rows(data, format_name, entry.shape[0])
    assert np.isfinite(weights).all()
    assert 0.8 < weights.std() * np.sqrt(entry.shape[1]) < 1.25
    assert abs(weights.mean()) < 0.15 * weights.std()  # quants run from -8 to 7


def test_the_reference_reader_sees_the_same(tmp_path: Path) -> None:
    reader = gguf.GGUFReader(make(tmp_path, "Q4_K"))
    planned = {tensor.name: tensor for tensor in planned_tensors(TINY, "Q4_K")}
    assert [tensor.name for tensor in reader.tensors] == list(planned)
    for tensor in reader.tensors:
        expected = planned[tensor.name]
        assert tensor.tensor_type.name == expected.format
        assert tuple(reversed(tensor.shape.tolist())) == expected.shape
        assert tensor.n_bytes == expected.size_bytes
    tokens = reader.get_field("tokenizer.ggml.tokens")
    assert tokens is not None
    assert len(tokens.contents()) == 320


def test_made_once_and_always_the_same(tmp_path: Path) -> None:
    said: list[str] = []
    first = random_model(tmp_path / "a", TINY, "Q4_0", said.append)
    again = random_model(tmp_path / "a", TINY, "Q4_0", said.append)
    other = make(tmp_path / "b", "Q4_0")
    assert first == again
    assert len(said) == 1
    assert first.read_bytes() == other.read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [first.name]


def test_other_shapes_have_other_names() -> None:
    names = {recipe_name(shape, name) for shape in (TINY, RandomShape(name="random-tiny")) for name in ("Q4_0", "Q4_K")}
    assert len(names) == 4


def test_a_full_disk_is_found_before_writing(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkFailed, match=r"big\.gguf and its packed form need 1000000000\.0 GB"):
        require_room(tmp_path, 10**18, "big.gguf")
