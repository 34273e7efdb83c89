"""The store: models appear whole or not at all, and whatever lies there can be listed, opened and removed."""

import json
import os
import time
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest

from potluck.core.errors import BadModelFile, BadRequest, DownloadFailed, ModelNotFound, WeightsMismatch
from potluck.core.paths import locate_folders
from potluck.weights import host_files
from potluck.weights.manifest import decode_manifest, weights_sha256
from potluck.weights.pull import Puller
from potluck.weights.store import ModelStore, Staging, StoredFile, require_model_id
from tests.support.damage import DAMAGES
from tests.support.tiny_models import tiny_gguf, write_folder


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "Tiny Model.gguf"
    path.write_bytes(tiny_gguf())
    return path


def stored_file(path: Path) -> StoredFile:
    return StoredFile(path.name, path.stat().st_size, "0" * 64)


def test_potluck_home_overrides_the_platform(tmp_path: Path) -> None:
    folders = locate_folders({"POTLUCK_HOME": str(tmp_path)})
    assert (folders.models, folders.cache) == (tmp_path / "models", tmp_path / "cache")
    assert locate_folders({}).models.name == "models"


def test_a_local_file_becomes_a_model(store: ModelStore, tiny: Path) -> None:
    entry = Puller(store).pull(str(tiny)).entry
    assert entry.id == "tiny-model"
    assert (entry.family, entry.layer_count, entry.context_length, entry.quantisation) == ("llama", 2, 128, "F32")
    assert store.list() == (entry,)
    assert store.find("tiny-model") == entry
    manifest = decode_manifest((store.root / "tiny-model" / "manifest.json").read_bytes())
    assert weights_sha256(manifest) == entry.weights_sha256
    checkpoint = store.open("tiny-model")
    assert checkpoint.facts.layer_count == 2
    checkpoint.close()
    assert not (store.root / ".staging" / "tiny-model").exists()


def test_the_copy_does_not_follow_the_original(store: ModelStore, tiny: Path) -> None:
    Puller(store).pull(str(tiny))
    before = store.path("tiny-model").read_bytes()
    with open(tiny, "r+b") as file:
        file.write(b"rubbish")
    assert store.path("tiny-model").read_bytes() == before


def test_a_link_shares_the_bytes(store: ModelStore, tiny: Path) -> None:
    Puller(store).pull(str(tiny), is_linked=True)
    assert store.path("tiny-model").samefile(tiny)


def test_pulling_twice_finds_it(store: ModelStore, tiny: Path) -> None:
    assert Puller(store).pull(str(tiny)).is_new
    assert not Puller(store).pull(str(tiny)).is_new


@pytest.mark.parametrize("damage", ["truncated", "deleted", "manifest", "no manifest"])
def test_pulling_again_mends_what_sizes_and_hashes_show_to_be_damaged(
    store: ModelStore, tiny: Path, damage: str
) -> None:
    entry = Puller(store).pull(str(tiny)).entry
    DAMAGES[damage](store.root / entry.id)
    assert entry.id in (store.fault(entry.id) or "")
    assert list(store.damaged()) == [entry.id]
    mended = Puller(store).pull(str(tiny))
    assert (mended.is_new, mended.entry.weights_sha256) == (True, entry.weights_sha256)
    assert store.damaged() == {}
    store.open(entry.id).close()
    assert not Puller(store).pull(str(tiny)).is_new
    assert [path.name for path in (store.root / ".staging").iterdir()] == ["tiny-model.lock"]


def test_a_damaged_model_stays_as_it_is_where_another_is_pulled_or_the_pull_fails(
    store: ModelStore, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Puller(store).pull(str(tiny)).entry
    DAMAGES["truncated"](store.root / entry.id)
    monkeypatch.setattr(store, "admit", lambda *_, **__: pytest.fail("is not reached"))
    with open(tiny, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(BadRequest, match="another model called tiny-model"):
        Puller(store).pull(str(tiny))
    assert store.path(entry.id).stat().st_size == 100


def test_another_model_does_not_take_the_name(store: ModelStore, tiny: Path, tmp_path: Path) -> None:
    entry = Puller(store).pull(str(tiny)).entry
    other = tmp_path / "other" / tiny.name
    other.parent.mkdir()
    other.write_bytes(tiny.read_bytes()[:-4] + bytes(4))
    with pytest.raises(BadRequest, match="--name"):
        Puller(store).pull(str(other))
    assert store.list() == (entry,)
    assert Puller(store).pull(str(other), name="tiny-2").entry.weights_sha256 != entry.weights_sha256


def test_a_folder_of_safetensors(store: ModelStore, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Tiny-HF")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling.py").write_text("import os")
    entry = Puller(store).pull(str(folder)).entry
    assert (entry.id, entry.format) == ("tiny-hf", "safetensors")
    assert {file.name for file in entry.files} == {"config.json", "model.safetensors"}
    store.open("tiny-hf").close()


def test_what_is_no_model_is_refused_before_it_is_copied(store: ModelStore, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(BadModelFile, match="broken"):
        Puller(store).pull(str(broken))
    assert not store.root.exists()


def test_a_truncated_file_is_refused(store: ModelStore, tiny: Path) -> None:
    os.truncate(tiny, tiny.stat().st_size - 1)
    with pytest.raises(BadModelFile):
        Puller(store).pull(str(tiny))
    assert store.list() == ()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A", "-x", ".staging", "ä", "a" * 65, "a\n"])
def test_ids_that_are_none(store: ModelStore, name: str) -> None:
    with pytest.raises(BadRequest):
        require_model_id(name)
    with pytest.raises(ModelNotFound):
        store.find(name)
    with pytest.raises(ModelNotFound):
        store.remove(name)


def test_not_found_says_what_to_type(store: ModelStore, tiny: Path) -> None:
    Puller(store).pull(str(tiny))
    with pytest.raises(ModelNotFound, match="did you mean tiny-model"):
        store.find("tinymodel")
    with pytest.raises(ModelNotFound, match="potluck pull smollm2-135m"):
        store.find("smollm2-135m")


def test_remove(store: ModelStore, tiny: Path) -> None:
    Puller(store).pull(str(tiny))
    store.remove("tiny-model")
    assert store.list() == ()
    assert [path.name for path in (store.root / ".staging").iterdir()] == ["tiny-model.lock"]


def test_changed_files_are_noticed(store: ModelStore, tiny: Path) -> None:
    Puller(store).pull(str(tiny))
    os.truncate(store.path("tiny-model"), 100)
    with pytest.raises(WeightsMismatch, match="potluck remove tiny-model"):
        store.open("tiny-model")


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100, b'{"id": 7}', b"\xff"])
def test_a_damaged_entry_is_named_and_can_be_removed(store: ModelStore, tiny: Path, content: bytes) -> None:
    Puller(store).pull(str(tiny))
    (store.root / "tiny-model" / "entry.json").write_bytes(content)
    assert store.list() == ()
    assert list(store.damaged()) == ["tiny-model"]
    with pytest.raises(BadModelFile, match="potluck remove tiny-model"):
        store.find("tiny-model")
    store.remove("tiny-model")
    assert store.damaged() == {}


def test_an_entry_cannot_point_outside(store: ModelStore, tiny: Path) -> None:
    entry = Puller(store).pull(str(tiny)).entry
    moved = msgspec.structs.replace(entry, files=(StoredFile("../../secret", 1, "0" * 64),))
    (store.root / "tiny-model" / "entry.json").write_bytes(msgspec.json.encode(moved))
    with pytest.raises(BadModelFile):
        store.open("tiny-model")


def test_a_failed_download_keeps_its_part_and_a_bad_model_does_not(store: ModelStore) -> None:
    def stage_and_fail(error: Exception) -> None:
        with store.stage("m") as staging:
            (staging.downloads / "m.gguf.part").write_bytes(b"half")
            raise error

    with pytest.raises(DownloadFailed):
        stage_and_fail(DownloadFailed("cut"))
    with store.stage("m") as staging:
        assert (staging.downloads / "m.gguf.part").read_bytes() == b"half"
    with pytest.raises(BadModelFile):
        stage_and_fail(BadModelFile("m.gguf", "magic", "is wrong"))
    assert not (store.root / ".staging" / "m").exists()


def test_staged_leftovers_do_not_get_in(store: ModelStore, tiny: Path) -> None:
    with store.stage("m") as staging:
        target = staging.files / "m.gguf"
        target.write_bytes(tiny.read_bytes())
        (staging.files / "left-over.bin").write_bytes(b"from an earlier attempt")
        store.admit(staging, [stored_file(target)], format="gguf", source="test")
    assert sorted(path.name for path in (store.root / "m").iterdir()) == ["entry.json", "m.gguf", "manifest.json"]


def test_one_process_at_a_time(store: ModelStore) -> None:
    with store.stage("m"), pytest.raises(BadRequest, match="another potluck process"), store.stage("m"):
        pass
    with store.stage("m") as staging:
        assert isinstance(staging, Staging)


def test_old_partial_downloads_and_half_removed_models_are_swept(store: ModelStore) -> None:
    weeks_ago = time.time() - 30 * 86400
    part = store.root / ".staging" / "old" / "downloads" / "x.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x")
    for path in (part, *list(part.parents)[:2]):
        os.utime(path, (weeks_ago, weeks_ago))
    recent = store.root / ".staging" / "recent" / "downloads"
    recent.mkdir(parents=True)
    removed = store.root / ".staging" / "gone.removed-00ff"
    removed.mkdir()
    with store.stage("m"):
        pass
    assert not part.exists()
    assert not removed.exists()
    assert recent.exists()


def test_files_that_are_not_models_do_not_disturb(store: ModelStore) -> None:
    store.root.mkdir(parents=True)
    (store.root / "notes.txt").write_text("mine")
    (store.root / "My Folder").mkdir()
    assert store.list() == ()
    assert store.damaged() == {}


def test_a_lock_dies_with_its_block(tmp_path: Path) -> None:
    def lock() -> AbstractContextManager[None]:
        return host_files.exclusive_lock(tmp_path / "a.lock", "taken")

    with lock(), pytest.raises(BadRequest, match="taken"), lock():
        pass
    with lock():
        pass


def test_the_entry_is_readable_json(store: ModelStore, tiny: Path) -> None:
    Puller(store).pull(str(tiny))
    entry = json.loads((store.root / "tiny-model" / "entry.json").read_text())
    assert entry["files"][0]["size_bytes"] == tiny.stat().st_size
    assert entry["source"] == str(tiny)
