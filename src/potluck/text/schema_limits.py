"""Schemas that llguidance would compute on for minutes, found before it begins. Pure; knows no vocabulary.

Its own counters bound most work, but not these two: the remainders of `multipleOf`, of which there are as many as the number says,
and the ways to leave out optional properties. Both are cheap to count here, and a clock would refuse in one place what another takes.
"""

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from potluck.core.errors import BadGrammar

MAX_MULTIPLE = 10_000  # of all numbers together: some tenths of a second; a million takes half a minute
MAX_OPTIONAL_PROPERTIES = 490  # of one object; the library's own limit, which it finds late, is hardly higher
_COMBINING = ("allOf", "$ref", "$dynamicRef")


def check_schema(schema: object) -> None:
    """Raises BadGrammar for a schema whose grammar would take too long to make."""
    multiples: list[Decimal] = []
    combines = False
    for part in _objects(schema):
        _check_properties(part)
        combines = combines or any(word in part for word in _COMBINING)
        multiple = part.get("multipleOf")
        if isinstance(multiple, int | float) and not isinstance(multiple, bool) and math.isfinite(multiple):
            multiples.append(abs(Decimal(str(multiple))))
    remainders = sum(set(map(_coefficient, multiples)))
    if remainders > MAX_MULTIPLE or (combines and _common_multiple(multiples) > MAX_MULTIPLE):
        raise BadGrammar(
            f"multipleOf: more than {MAX_MULTIPLE} remainders, all numbers together, cannot be kept account of"
        )


def _objects(schema: object) -> Iterator[dict[str, Any]]:
    """Every object in it, wherever it stands; without recursion, as whoever wrote it chose the depth."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part


def _check_properties(part: dict[str, Any]) -> None:
    properties, required = part.get("properties"), part.get("required")
    if not isinstance(properties, dict):
        return
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    optional = sum(name not in needed for name in properties)
    if optional > MAX_OPTIONAL_PROPERTIES:
        raise BadGrammar(
            f"an object may have {MAX_OPTIONAL_PROPERTIES} properties that are not required, not {optional}"
        )


def _coefficient(number: Decimal) -> int:
    """The number without its decimal point: 0.25 has as many remainders as 25."""
    return int(number.normalize().scaleb(-min(0, _exponent(number)))) if number else 0


def _exponent(number: Decimal) -> int:
    exponent = number.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return exponent


def _common_multiple(numbers: list[Decimal]) -> int:
    """What holds where all of them hold at once, on one scale; parts that refer to each other may come to that."""
    shift = -min([0, *map(_exponent, numbers)])
    common = 1
    for number in numbers:
        common = math.lcm(common, int(number.scaleb(shift)) or 1)
        if common > MAX_MULTIPLE:
            break
    return common
