"""Layer ranges. People see inclusive ranges (`0-14`, `15-output`); code uses half-open ones. Pure."""

import re

import msgspec

from potluck.core.errors import BadRequest

_RANGE = re.compile(r"(\d{1,5})-(\d{1,5}|output)", re.ASCII)


class LayerRange(msgspec.Struct, frozen=True, order=True):
    """Layers start ≤ layer < stop of a model; empty ranges do not exist."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise BadRequest(
                f"layers {self.start}..{self.stop - 1} are not a range: the first must not be after the last"
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(self.start, self.stop))

    def __str__(self) -> str:
        return f"{self.start}-{self.stop - 1}"

    @classmethod
    def parse(cls, text: str, layer_count: int) -> "LayerRange":
        """Reads `0-14` or `15-output` (inclusive, as people write it) for a model of `layer_count` layers."""
        match = _RANGE.fullmatch(text.strip())
        if match is None:
            raise BadRequest(f"{text!r} is not a layer range; write it like 0-14 or 15-output")
        start = int(match[1])
        last = layer_count - 1 if match[2] == "output" else int(match[2])
        if last >= layer_count:
            raise BadRequest(f"layers {text} go past the last one: this model has layers 0-{layer_count - 1}")
        return cls(start, last + 1)
