"""What we accept from llama.cpp, and what its process answers; no model is loaded."""

import io
import sys

import msgspec
import pytest

from potluck.bench.llama_cpp import (
    Complete,
    Completed,
    Describe,
    Description,
    check_completed,
    features_of,
    require_features,
    require_installed,
)
from potluck.bench.llama_cpp_child import serve
from potluck.core.errors import BenchmarkFailed

GOOD = "CPU : SSE3 = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | OPENMP = 1 | REPACK = 1 | "
REQUEST = Complete(tuple(range(100)), 9, keeps_prompt=True)
DONE = Completed(
    cached_tokens=99,
    prompt_tokens=1,
    prompt_s=0.1,
    predicted_tokens=9,
    predicted_s=0.4,
    wall_s=0.501,
    processor_s=1.0,
)


def test_features() -> None:
    assert features_of(GOOD.replace("FMA = 1", "FMA = 0"))["FMA"] is False
    assert features_of("CPU : AVX_VNNI = 1 | LLAMAFILE = 1") == {"AVX_VNNI": True, "LLAMAFILE": True}
    require_features(GOOD)


@pytest.mark.parametrize("info", [GOOD.replace("AVX2 = 1", "AVX2 = 0"), GOOD.replace("AVX2 = 1 | ", "")])
def test_slow_builds_are_refused(info: str) -> None:
    with pytest.raises(BenchmarkFailed, match="reports no AVX2 here"):
        require_features(info)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(BenchmarkFailed, match="-m pip install xllamacpp"):
        require_installed()


def test_speeds_come_from_its_own_clock() -> None:
    done = check_completed(DONE, REQUEST, threads=2)
    assert done.decode_speed == 20.0
    assert done.prompt_speed == 10.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 2}, "99 \\+ 2 prompt tokens instead of 100"),
        ({"predicted_tokens": 8}, "8 tokens instead of 9"),
        ({"processor_s": 2.0}, "4.0 threads were busy instead of 2"),
        ({"wall_s": 0.7}, "our clock says 0.700 s"),
    ],
)
def test_figures_that_contradict_the_request(changes: dict[str, float], message: str) -> None:
    with pytest.raises(BenchmarkFailed, match=message):
        check_completed(msgspec.structs.replace(DONE, **changes), REQUEST, threads=2)


def test_a_cache_that_was_not_asked_for() -> None:
    with pytest.raises(BenchmarkFailed, match="99 tokens came from a cache"):
        check_completed(DONE, msgspec.structs.replace(REQUEST, keeps_prompt=False), threads=2)


def test_the_child_answers_each_line() -> None:
    pytest.importorskip("xllamacpp")
    requests = b"".join(msgspec.json.encode(request) + b"\n" for request in (Describe(), REQUEST)) + b"{}\n"
    answers = io.BytesIO()
    serve(io.BytesIO(requests), answers)
    described, *failed = answers.getvalue().splitlines()
    assert "SSE3" in msgspec.json.decode(described, type=Description).system_info
    assert [list(msgspec.json.decode(line)) for line in failed] == [["error"], ["error"]]
