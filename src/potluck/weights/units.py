"""A model cut into units, the smallest parts that a node takes or drops: each layer, the embedding, the output. Pure.

Every tensor has a fixed, aligned place in its unit, which follows from the manifest alone.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from potluck.core.layers import LayerRange
from potluck.core.model_facts import ModelFacts
from potluck.weights.manifest import Manifest, TensorRecord
from potluck.wire.messages import Stage

EMBEDDING, OUTPUT = "embedding", "output"
ALIGNMENT = 64
_LAYER = re.compile(r"layer-(\d{4,5})", re.ASCII)


class MissingChunk(NamedTuple):
    """One that is to be fetched."""

    tensor: str
    chunk: int
    size_bytes: int


class Place(msgspec.Struct, frozen=True):
    record: TensorRecord
    offset: int  # within the unit


class Unit(msgspec.Struct, frozen=True):
    name: str
    places: tuple[Place, ...]
    size_bytes: int

    @property
    def chunk_count(self) -> int:
        return sum(len(place.record.chunks) for place in self.places)


class Held(msgspec.Struct, frozen=True):
    """Which units are whole. Prints as people see ranges: `0-14`, `15-output`, `0-4,9-11`."""

    layer_count: int
    layers: tuple[int, ...]
    has_embedding: bool
    has_output: bool

    def __str__(self) -> str:
        ranges = [str(part) for part in ranges_of(self.layers)]
        if self.has_output:
            reaches_end = bool(self.layers) and self.layers[-1] == self.layer_count - 1
            last = ranges.pop().split("-")[0] if reaches_end else ""
            ranges.append(f"{last}-output" if last else OUTPUT)
        if self.has_embedding and 0 not in self.layers:
            ranges.insert(0, EMBEDDING)
        return ",".join(ranges) or "nothing"


def ranges_of(layers: Iterable[int]) -> list[LayerRange]:
    """Ascending layers, joined where they touch."""
    ranges: list[LayerRange] = []
    for layer in layers:
        if ranges and ranges[-1].stop == layer:
            ranges[-1] = LayerRange(ranges[-1].start, layer + 1)
        else:
            ranges.append(LayerRange(layer, layer + 1))
    return ranges


def layer_unit(layer: int) -> str:
    return f"layer-{layer:04d}"


def unit_of(tensor: str) -> str:
    """The name of the unit that a tensor belongs to."""
    if tensor.startswith("layers."):
        return layer_unit(int(tensor.split(".")[1]))
    return EMBEDDING if tensor == "embedding" else OUTPUT


def cut_into_units(manifest: Manifest) -> dict[str, Unit]:
    """All units by name, in the order in which a token meets them."""
    records: dict[str, list[TensorRecord]] = {}
    for record in manifest.tensors:
        records.setdefault(unit_of(record.name), []).append(record)
    return {name: _lay_out(name, group) for name, group in records.items()}


def _lay_out(name: str, records: Sequence[TensorRecord]) -> Unit:
    places, offset = [], 0
    for record in records:
        places.append(Place(record, offset))
        offset += -(-record.size_bytes // ALIGNMENT) * ALIGNMENT
    return Unit(name, tuple(places), offset)


def stage_units(facts: ModelFacts, stage: Stage) -> tuple[str, ...]:
    """What a stage needs. A tied output computes with the embedding's tensor."""
    names = [layer_unit(layer) for layer in range(stage.start, stage.stop)]
    if stage.has_embedding or (stage.has_output and facts.is_output_tied):
        names.insert(0, EMBEDDING)
    return (*names, OUTPUT) if stage.has_output else tuple(names)


def held_of(unit_names: Iterable[str], layer_count: int) -> Held:
    names = set(unit_names)
    layers = sorted(int(match[1]) for match in map(_LAYER.fullmatch, names) if match is not None)
    return Held(
        layer_count, tuple(layer for layer in layers if layer < layer_count), EMBEDDING in names, OUTPUT in names
    )


def shown_units(names: Iterable[str], layer_count: int) -> str:
    """For messages: `layers 3-5, the embedding`."""
    held = held_of(names, layer_count)
    parts = [f"layers {part}" if len(part) > 1 else f"layer {part.start}" for part in ranges_of(held.layers)]
    parts += ["the embedding"] if held.has_embedding else []
    parts += ["the output"] if held.has_output else []
    return ", ".join(parts) or "nothing"
