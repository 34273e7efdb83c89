"""Units: where tensors lie, what a stage needs, and how holdings are shown."""

from pathlib import Path

import pytest

from potluck.weights.units import ALIGNMENT, cut_into_units, held_of, layer_unit, shown_units, stage_units
from potluck.wire.messages import Stage
from tests.support.partial_models import whole_tiny
from tests.support.tiny_models import LLAMA_FACTS


def test_every_tensor_has_one_aligned_place_and_none_overlap(tmp_path: Path) -> None:
    manifest = whole_tiny(tmp_path).manifest
    units = cut_into_units(manifest)
    assert list(units) == ["embedding", "layer-0000", "layer-0001", "output"]
    assert [p.record.name for u in units.values() for p in u.places] == [r.name for r in manifest.tensors]
    for unit in units.values():
        end = 0
        for place in unit.places:
            assert place.offset % ALIGNMENT == 0
            assert place.offset >= end
            end = place.offset + place.record.size_bytes
        assert end <= unit.size_bytes


def test_a_tied_output_needs_the_embedding() -> None:
    assert stage_units(LLAMA_FACTS, Stage(1, 2, False, True)) == ("embedding", "layer-0001", "output")
    assert stage_units(LLAMA_FACTS, Stage(0, 1, True, False)) == ("embedding", "layer-0000")
    assert stage_units(LLAMA_FACTS, Stage(0, 1)) == ("layer-0000",)


@pytest.mark.parametrize(
    ("units", "shown", "spoken"),
    [
        ([], "nothing", "nothing"),
        (["embedding", *map(layer_unit, range(15))], "0-14", "layers 0-14, the embedding"),
        (["embedding", "output", *map(layer_unit, range(15, 30))], "embedding,15-output", "layers 15-29, the embedding, the output"),
        ([*map(layer_unit, (3, 4, 9)), "output"], "3-4,9-9,output", "layers 3-4, layer 9, the output"),
        (["embedding", "output", *map(layer_unit, range(30))], "0-output", "layers 0-29, the embedding, the output"),
    ],
)  # fmt: skip
def test_holdings_as_people_see_them(units: list[str], shown: str, spoken: str) -> None:
    assert str(held_of(units, 30)) == shown
    assert shown_units(units, 30) == spoken
