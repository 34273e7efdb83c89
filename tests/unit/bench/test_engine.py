"""Turns, token ids and the machine: what the measurements are made of, without any engine."""

from pathlib import Path

import psutil
import pytest

from potluck.bench.bandwidth import read_bandwidth
from potluck.bench.busy_core import busy_core
from potluck.bench.engine import alternate, require_context
from potluck.bench.machine import processor_name
from potluck.bench.own_engine import ModelFile, token_ids
from potluck.core.errors import BadRequest, ModelNotFound


def test_sides_take_turns_and_the_first_turn_does_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    ours, theirs = alternate(2, [lambda: side("ours"), lambda: side("theirs")], settle_s=0.0)
    assert order == ["ours", "theirs"] * 3
    assert (ours, theirs) == ([3.0, 5.0], [4.0, 6.0])


@pytest.mark.parametrize("vocabulary", [64, 320, 49_152])
def test_token_ids_stay_inside_the_vocabulary(vocabulary: int) -> None:
    ids = token_ids(2000, vocabulary)
    assert min(ids) >= min(500, vocabulary // 4)
    assert max(ids) < vocabulary
    assert token_ids(10, vocabulary, first=100) == ids[100:110]


def test_short_contexts_are_refused() -> None:
    with pytest.raises(BadRequest, match="context of 512 is too short"):
        require_context(512, 2065)


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    for name, content in (("a.gguf", b"same"), ("b.gguf", b"same"), ("c.gguf", b"other")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (ModelFile.outside_the_store(tmp_path / name, tmp_path) for name in ("a.gguf", "b.gguf", "c.gguf"))
    assert a.source == b.source != c.source
    assert a.packed_folder == tmp_path / "packed" / a.source
    with pytest.raises(ModelNotFound, match="takes GGUF files"):
        ModelFile.outside_the_store(tmp_path, tmp_path)


def test_the_processor_has_a_name(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some Processor @ 2 GHz\n")
    assert processor_name(cpuinfo) == "Some Processor @ 2 GHz"
    assert processor_name(tmp_path / "nothing")


def test_bandwidth_is_a_plausible_number() -> None:
    assert 1e8 < read_bandwidth(2, rounds=1, size_bytes=4 << 20) < 1e13


def test_the_busy_core_is_idle_again_after_an_error() -> None:
    ids: list[int] = []

    def fail_beside_it() -> None:
        with busy_core(limit_s=30.0) as process_id:
            assert psutil.pid_exists(process_id)
            ids.append(process_id)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_beside_it()
    assert not psutil.pid_exists(ids[0])
