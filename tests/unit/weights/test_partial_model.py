"""Partial models: nothing unverified appears, whatever moment a writer dies at; what is there has the original's bytes."""

import errno
from pathlib import Path

import pytest

from potluck.core.errors import BadModelFile, BadRequest, DownloadFailed, WeightsMismatch, WeightsMissing
from potluck.weights.file_copy import file_faults
from potluck.weights.manifest import build_manifest, verify_tensors, weights_sha256
from potluck.weights.open_model import open_checkpoint
from potluck.weights.partial_model import PartialModel, held_units
from potluck.weights.store import ModelStore
from potluck.weights.units import unit_of
from potluck.wire.messages import Stage
from tests.support.partial_models import WholeModel, whole_tiny


@pytest.fixture
def whole(tmp_path: Path) -> WholeModel:
    return whole_tiny(tmp_path / "whole")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "models"


def reopened(root: Path) -> PartialModel:
    return ModelStore(root).partial("tiny")


def test_it_opens_like_the_original_and_refuses_what_it_does_not_hold(whole: WholeModel, root: Path) -> None:
    partial = whole.empty_copy(root)
    whole.fill(partial, ("embedding", "layer-0000"))
    checkpoint = ModelStore(root).open("tiny")
    assert checkpoint.facts == whole.checkpoint.facts
    assert checkpoint.tokenizer == whole.checkpoint.tokenizer
    assert list(checkpoint.tensors) == list(whole.checkpoint.tensors)
    names = [name for name in checkpoint.tensors if name == "embedding" or name.startswith("layers.0.")]
    verify_tensors(checkpoint, whole.manifest, names)
    for name in names:
        assert bytes(checkpoint.read(name)) == bytes(whole.checkpoint.read(name))
        checkpoint.forget(name)
    for name in set(checkpoint.tensors) - set(names):
        with pytest.raises(WeightsMissing, match=r"layer 1|the output"):
            checkpoint.read(name)
    whole.fill(partial, ("layer-0001", "output"))  # what comes later is seen by who has it open
    assert weights_sha256(build_manifest(checkpoint)) == whole.entry.weights_sha256
    checkpoint.close()


def test_the_store_lists_what_is_held(whole: WholeModel, root: Path) -> None:
    partial = whole.empty_copy(root)
    [entry] = ModelStore(root).list()
    assert (entry.format, entry.held, entry.size_bytes) == ("partial", "nothing", 0)
    assert entry.weights_sha256 == whole.entry.weights_sha256
    assert (entry.parameter_count, entry.family) == (whole.entry.parameter_count, whole.entry.family)
    whole.fill(partial, ("embedding", "layer-0000"))
    [entry] = ModelStore(root).list()
    assert entry.held == "0-0"
    assert entry.size_bytes == partial.units["embedding"].size_bytes + partial.units["layer-0000"].size_bytes
    assert ModelStore(root).find_weights(entry.weights_sha256) == entry
    ModelStore(root).remove("tiny")
    assert ModelStore(root).list() == ()


def test_wrong_bytes_are_never_written(whole: WholeModel, root: Path) -> None:
    partial = whole.empty_copy(root)
    missing = partial.begin(("layer-0000",))
    for chunk in missing:
        right = whole.chunk(chunk.tensor, chunk.chunk)
        for wrong in (right[:-1], right + b"\0", b"", right[:-1] + bytes([right[-1] ^ 1])):
            with pytest.raises(WeightsMismatch):
                partial.put(chunk.tensor, chunk.chunk, wrong)
    assert held_units(partial.folder) == ()
    assert partial.begin(("layer-0000",)) == missing


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_writer_may_die_after_any_chunk_or_within_it(whole: WholeModel, root: Path, is_torn: bool) -> None:
    """Re-opened at every prefix of the writes: what was verified is used again, what was torn is not believed."""
    whole.empty_copy(root)
    everything = reopened(root).begin(("embedding", "layer-0000", "layer-0001", "output"))
    for count, chunk in enumerate(everything):
        partial = reopened(root)
        assert partial.begin(tuple(partial.units)) == everything[count:]
        _check_all_that_is_mapped(whole, root)
        if is_torn:
            half = whole.chunk(chunk.tensor, chunk.chunk)[: chunk.size_bytes // 2]
            _write_unchecked(partial, chunk.tensor, half)
            assert reopened(root).begin(tuple(partial.units)) == everything[count:]
            _check_all_that_is_mapped(whole, root)
        partial.put(chunk.tensor, chunk.chunk, whole.chunk(chunk.tensor, chunk.chunk))
    assert reopened(root).missing_units(partial.units) == ()
    assert list((root / "tiny" / "units").glob("*.part")) == []
    _check_all_that_is_mapped(whole, root)


def test_a_part_that_was_cut_short_is_begun_again(whole: WholeModel, root: Path) -> None:
    partial = whole.empty_copy(root)
    everything = partial.begin(("layer-0000",))
    partial.put(everything[0].tensor, 0, whole.chunk(everything[0].tensor, 0))
    part = root / "tiny" / "units" / "layer-0000.part"
    part.write_bytes(part.read_bytes()[:-1])
    assert reopened(root).begin(("layer-0000",)) == everything


def test_a_chunk_that_comes_twice_changes_nothing(whole: WholeModel, root: Path) -> None:
    partial = whole.empty_copy(root)
    for missing in partial.begin(("embedding", "layer-0000")):
        for _ in range(2):
            partial.put(missing.tensor, missing.chunk, whole.chunk(missing.tensor, missing.chunk))
    assert held_units(partial.folder) == ("embedding", "layer-0000")


def _write_unchecked(partial: PartialModel, tensor: str, data: bytes) -> None:
    unit = partial.units[unit_of(tensor)]
    [place] = [place for place in unit.places if place.record.name == tensor]
    with (partial.folder / "units" / f"{unit.name}.part").open("r+b") as file:
        file.seek(place.offset)
        file.write(data)


def _check_all_that_is_mapped(whole: WholeModel, root: Path) -> None:
    checkpoint = open_checkpoint(root / "tiny")
    for name in checkpoint.tensors:
        try:
            data = checkpoint.read(name)
        except WeightsMissing:
            continue
        assert bytes(data) == bytes(whole.checkpoint.read(name))
        del data
    checkpoint.close()


def test_a_writer_may_die_between_the_last_chunk_and_the_rename(whole: WholeModel, root: Path) -> None:
    partial = whole.empty_copy(root)
    whole.fill(partial, ("layer-0000",))
    done = root / "tiny" / "units" / "layer-0000.weights"
    done.rename(done.with_suffix(".part"))
    assert held_units(root / "tiny") == ()
    assert reopened(root).begin(("layer-0000",)) == []
    assert held_units(root / "tiny") == ("layer-0000",)


def test_a_complete_file_of_another_size_is_neither_mapped_nor_counted(whole: WholeModel, root: Path) -> None:
    partial = whole.empty_copy(root)
    whole.fill(partial, ("layer-0000",))
    path = root / "tiny" / "units" / "layer-0000.weights"
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(BadModelFile, match="size"):
        open_checkpoint(root / "tiny").read("layers.0.query")
    assert reopened(root).missing_units(("layer-0000",)) == ("layer-0000",)
    assert reopened(root).held.layers == ()


def test_dropped_layers_give_their_space_back_and_mapped_ones_stay_readable(whole: WholeModel, root: Path) -> None:
    partial = whole.empty_copy(root)
    whole.fill(partial, tuple(partial.units))
    (root / "tiny" / "packed").mkdir()
    for name in ("layer-0000.abc.packed", "layer-0001.abc.packed"):
        (root / "tiny" / "packed" / name).write_bytes(b"x")
    checkpoint = open_checkpoint(root / "tiny")
    view = checkpoint.read("layers.0.query")
    ModelStore(root).keep_only("tiny", [Stage(1, 2, False, True)])
    assert ModelStore(root).find("tiny").held == "embedding,1-output"
    assert [path.name for path in (root / "tiny" / "packed").iterdir()] == ["layer-0001.abc.packed"]
    assert bytes(view) == bytes(whole.checkpoint.read("layers.0.query"))
    with pytest.raises(WeightsMissing):
        open_checkpoint(root / "tiny").read("layers.0.query")
    whole.fill(reopened(root), ("layer-0000",))
    assert ModelStore(root).find("tiny").held == "0-output"


def test_two_writers_of_one_model_are_kept_apart(whole: WholeModel, root: Path) -> None:
    whole.empty_copy(root)
    store = ModelStore(root)
    with store.working_on("tiny"), pytest.raises(BadRequest, match="another potluck process"):
        store.keep_only("tiny", [])


def test_a_tokenizer_or_manifest_that_was_changed_is_refused(whole: WholeModel, root: Path) -> None:
    whole.empty_copy(root)
    (root / "tiny" / "tokenizer-spec.json").write_text('{"algorithm": "byte_bpe", "tokens": [], "kinds": []}')
    with pytest.raises(WeightsMismatch, match="does not cover"):
        _ = open_checkpoint(root / "tiny").tokenizer
    manifest = root / "tiny" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"tiny"', b'"tinY"'))
    with pytest.raises(WeightsMismatch, match="manifest"):
        reopened(root)


def test_another_model_of_that_name_is_not_overwritten(whole: WholeModel, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="whole"):
        whole.store.create_partial("tiny", whole.manifest, whole.tokenizer, "a test")


def test_a_folder_that_cannot_be_written_is_said_in_words(whole: WholeModel, root: Path) -> None:
    partial = whole.empty_copy(root)
    partial.begin(("layer-0000",))
    for path in (root / "tiny" / "units").iterdir():
        path.unlink()
    with pytest.raises(DownloadFailed, match="No such file"), file_faults():
        partial.put("layers.0.query", 0, whole.chunk("layers.0.query", 0))
    with pytest.raises(DownloadFailed, match="No space left"), file_faults():
        raise OSError(errno.ENOSPC, "No space left on device")
