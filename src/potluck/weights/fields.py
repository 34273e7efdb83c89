"""Typed, range-checked access to the key-value pairs of a model file; a null counts as absent. Knows no key by name."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from potluck.core.errors import BadModelFile
from potluck.weights.source_tensor import shown

_Default = TypeVar("_Default")


class Fields:
    """`prefix` goes before every key, and into the errors. Without a default, a missing key is an error."""

    def __init__(self, values: Mapping[str, object], file: Path, prefix: str = "", is_nested: bool = False) -> None:
        self._values = values
        self._prefix = prefix
        self._key_prefix = "" if is_nested else prefix
        self.file = file

    def get(self, key: str) -> object:
        return self._values.get(self._key_prefix + key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, f"{shown(value)} is not an integer")
        if not low <= value <= high:
            raise self.bad(key, f"{shown(value)} is not between {low} and {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        return self._finite(key, self._required(key, default), low, high)

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        value = self._required(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.bad(key, f"{shown(value)} is not a list of {count} numbers")
        return tuple(self._finite(key, element, low, high) for element in value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, f"{shown(value)} is neither true nor false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self.bad(key, f"{shown(value)} is not a text")
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise self.bad(key, f"{shown(value)} is not valid Unicode")
        return value

    def section(self, key: str) -> "Fields | None":
        """The object under `key`, or None where there is none (or an empty one)."""
        value = self.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, f"{shown(value)} is not an object")
        return Fields(value, self.file, f"{self._prefix}{key}.", is_nested=True)

    def bad(self, key: str, problem: str) -> BadModelFile:
        return BadModelFile(self.file, self._prefix + key, problem)

    def _required(self, key: str, default: _Default | None) -> object:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.bad(key, "is missing")
        return value

    def _finite(self, key: str, value: object, low: float, high: float) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, f"{shown(value)} is not a number")
        if not low <= value <= high or not math.isfinite(value):  # NaN fails the first comparison
            raise self.bad(key, f"{shown(value)} is not between {low:g} and {high:g}")
        return float(value)
