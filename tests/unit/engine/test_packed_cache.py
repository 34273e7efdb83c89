"""Packed weights on disk: all of a file or nothing, the right one or a new one, and memory where there is no disk."""

import errno
import io
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from potluck.engine import packed_cache
from potluck.engine.kernels.layout import LAYOUTS
from potluck.engine.packed_cache import PackedCache, PackedTensor
from tests.support.memory_checkpoint import MemoryCheckpoint
from tests.support.random_weights import FORMATS, QUANTISED_FORMATS, random_weights

NAMES = ("layers.0.query", "layers.0.down")


class CountingCheckpoint(MemoryCheckpoint):
    """Says how often weights were read, and can fail at the n-th read as a broken disk would."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.reads = 0
        self._fails_at = fails_at

    def read(self, name: str) -> memoryview:
        self.reads += 1
        if self.reads == self._fails_at:
            raise KeyboardInterrupt
        return super().read(name)


def checkpoint_of(format_name: str = "Q4_1", seed: int = 0, fails_at: int | None = None) -> CountingCheckpoint:
    rng = np.random.default_rng(seed)
    checkpoint = CountingCheckpoint(fails_at)
    for name, rows in zip(NAMES, (50, 16), strict=True):
        checkpoint.put(name, format_name, (rows, 512), random_weights(rng, format_name, rows, 512))
    return checkpoint


def contents(tensors: Mapping[str, PackedTensor]) -> dict[str, bytes]:
    """The packed bytes, read through the addresses that kernels use."""
    result = {}
    for name, tensor in tensors.items():
        first = tensor.address - tensor.memory.ctypes.data
        result[name] = tensor.memory[first : first + tensor.groups * tensor.group_bytes].tobytes()
    return result


def load(folder: Path | None, checkpoint: MemoryCheckpoint | None = None, source: str = "abc") -> dict[str, bytes]:
    return contents(PackedCache(folder, source).load(checkpoint or checkpoint_of(), "layer-0000", NAMES))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_mapped_file_holds_what_memory_would(format_name: str, tmp_path: Path) -> None:
    assert load(tmp_path, checkpoint_of(format_name)) == load(None, checkpoint_of(format_name))
    assert len(files_in(tmp_path)) == 1


@pytest.mark.parametrize("format_name", QUANTISED_FORMATS)
def test_packed_weights_take_what_the_file_takes(format_name: str) -> None:
    """Memory's speed is what an answer waits for: a byte more per block is a slower token."""
    raw = random_weights(np.random.default_rng(1), format_name, 32, 512)
    assert LAYOUTS[format_name].packed_bytes(32, 512) == raw.nbytes


def test_a_second_load_reads_no_weights(tmp_path: Path) -> None:
    first = load(tmp_path)
    [path] = files_in(tmp_path)
    written = path.stat().st_mtime_ns
    checkpoint = checkpoint_of()
    assert load(tmp_path, checkpoint) == first
    assert checkpoint.reads == 0
    assert path.stat().st_mtime_ns == written


def test_mapped_weights_cannot_be_written_to(tmp_path: Path) -> None:
    tensor = PackedCache(tmp_path, "abc").load(checkpoint_of(), "unit", NAMES)[NAMES[0]]
    with pytest.raises(ValueError, match="read-only"):
        tensor.memory[0] = 1


def test_files_are_written_in_large_pieces_at_multiples_of_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_cache, "_PIECE_BYTES", 8192)
    lengths: list[int] = []

    class Slow(io.FileIO):
        def write(self, data: object) -> int:
            lengths.append(len(data))  # type: ignore[arg-type]
            return super().write(data[:5000])  # type: ignore[index]

    monkeypatch.setattr(packed_cache.os, "fdopen", lambda handle, *_, **__: Slow(handle, "wb"))
    first = load(tmp_path)
    monkeypatch.undo()
    assert load(None) == first
    checkpoint = checkpoint_of()
    assert load(tmp_path, checkpoint) == first
    assert checkpoint.reads == 0
    assert set(lengths[:-2]) <= {8192, 3192}  # what a write leaves over is written next


def test_kernels_may_read_ahead_of_the_last_tensor(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        tensor = PackedCache(folder, "abc").load(checkpoint_of(), "unit", NAMES)[NAMES[-1]]
        end = tensor.address + tensor.groups * tensor.group_bytes
        assert tensor.memory.ctypes.data + len(tensor.memory) - end >= 4096


def test_another_model_gets_another_file(tmp_path: Path) -> None:
    first, second = load(tmp_path, checkpoint_of(seed=1), "one"), load(tmp_path, checkpoint_of(seed=2), "two")
    assert first != second
    assert len(files_in(tmp_path)) == 2
    assert load(tmp_path, checkpoint_of(seed=1), "one") == first


def test_what_an_older_layout_left_goes_and_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LAYOUT_VERSION", packed_cache.LAYOUT_VERSION - 1)
    load(tmp_path)
    [old] = files_in(tmp_path)
    monkeypatch.undo()
    kept = [tmp_path / "layer-0000.other.packed", tmp_path / "layer-0001.older.packed"]
    kept[0].write_bytes(b"somebody's own")
    kept[1].write_bytes(old.read_bytes())  # another layer's: its turn comes when that is packed
    load(tmp_path)
    [new] = set(files_in(tmp_path)) - set(kept)
    assert new != old
    load(tmp_path)
    assert files_in(tmp_path) == sorted([new, *kept])


def test_what_a_newer_layout_wrote_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LAYOUT_VERSION", packed_cache.LAYOUT_VERSION + 1)
    load(tmp_path)
    monkeypatch.undo()
    load(tmp_path)
    assert len(files_in(tmp_path)) == 2


def spoil_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")


def cut_short(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def put_rubbish(path: Path) -> None:
    path.write_bytes(np.random.default_rng(1).bytes(path.stat().st_size))


@pytest.mark.parametrize("spoil", [spoil_header, cut_short, empty, lengthen, put_rubbish])
def test_a_spoiled_file_is_made_again(spoil: object, tmp_path: Path) -> None:
    first = load(tmp_path)
    [path] = files_in(tmp_path)
    spoil(path)  # type: ignore[operator]
    checkpoint = checkpoint_of()
    assert load(tmp_path, checkpoint) == first
    assert checkpoint.reads == len(NAMES)
    again = checkpoint_of()
    assert load(tmp_path, again) == first
    assert again.reads == 0
    assert files_in(tmp_path) == [path]


def test_a_file_with_another_models_header_is_made_again(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    first = load(ours, checkpoint_of(seed=1), "one")
    load(theirs, checkpoint_of(seed=2), "two")
    [our_file], [their_file] = files_in(ours), files_in(theirs)
    our_file.write_bytes(their_file.read_bytes())
    assert load(ours, checkpoint_of(seed=1), "one") == first


def test_an_interrupted_packing_leaves_nothing_behind(tmp_path: Path) -> None:
    for fails_at in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path, checkpoint_of(fails_at=fails_at))
        assert files_in(tmp_path) == []


def test_a_file_that_another_process_finishes_while_old_ones_are_looked_for_is_no_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / f"{packed_cache._PREFIX}gone"
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([gone]))
    packed_cache._sweep(tmp_path)


def test_the_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Watching(CountingCheckpoint):
        def read(self, name: str) -> memoryview:
            seen.append([path.name for path in files_in(tmp_path) if path.suffix == ".packed"])
            return super().read(name)

    watching, plain = Watching(), checkpoint_of()
    for name in NAMES:
        entry = plain.tensors[name]
        watching.put(name, entry.format, entry.shape, np.frombuffer(plain.read(name), np.uint8))
    load(tmp_path, watching)
    assert seen == [[], []]
    assert len(files_in(tmp_path)) == 1


def test_where_no_folder_can_be_made_memory_is_used(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    assert load(in_the_way / "cache") == load(None)
    assert in_the_way.read_text() == "not a folder"


def test_where_the_files_place_is_taken_memory_is_used(tmp_path: Path) -> None:
    first = load(tmp_path)
    [path] = files_in(tmp_path)
    path.unlink()
    path.mkdir()
    (path / "something").touch()
    assert load(tmp_path) == first
    assert files_in(tmp_path) == [path]


LOADER = textwrap.dedent(
    """
    import hashlib, resource, signal, sys
    from pathlib import Path
    from tests.unit.engine.test_packed_cache import load
    if len(sys.argv) > 2:  # a disk that is nearly full
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
    print("ready", flush=True)
    sys.stdin.readline()
    for name, data in sorted(load(Path(sys.argv[1])).items()):
        print(name, hashlib.sha256(data).hexdigest())
    """
)


def start_loader(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", LOADER, str(folder), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)


def results_of(loaders: list[subprocess.Popen[str]]) -> list[str]:
    """All start at the same moment, once the last of them has imported what it needs."""
    for loader in loaders:
        assert loader.stdout is not None
        assert loader.stdout.readline() == "ready\n"
    for loader in loaders:
        assert loader.stdin is not None
        loader.stdin.write("go\n")
        loader.stdin.flush()
    results = [loader.communicate(timeout=60)[0] for loader in loaders]
    assert all(loader.returncode == 0 for loader in loaders)
    return results


def test_processes_that_pack_at_once_agree(tmp_path: Path) -> None:
    results = results_of([start_loader(tmp_path) for _ in range(3)])
    assert results[0]
    assert set(results) == {results[0]}
    assert len(files_in(tmp_path)) == 1
    assert results_of([start_loader(tmp_path)]) == results[:1]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are Unix's")
def test_where_the_disk_is_full_memory_is_used(tmp_path: Path) -> None:
    full, free = tmp_path / "full", tmp_path / "free"
    assert results_of([start_loader(full, "20000")]) == results_of([start_loader(free)])
    assert files_in(full) == []


def test_a_disk_that_was_full_once_is_left_alone_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def fail(path: Path, *_: object) -> None:
        tries.append(path)
        raise OSError(errno.ENOSPC, "no space left")

    PackedCache(tmp_path, "abc").load(checkpoint_of(), "layer-0002", NAMES)
    monkeypatch.setattr(packed_cache, "_write", fail)
    cache, checkpoint = PackedCache(tmp_path, "abc"), checkpoint_of()
    found = [contents(cache.load(checkpoint, unit, NAMES)) for unit in ("layer-0000", "layer-0001", "layer-0002")]
    assert found == [load(None)] * 3
    assert (len(tries), len(caplog.messages)) == (1, 1)
    assert checkpoint.reads == 2 * len(NAMES)  # the third was there already
