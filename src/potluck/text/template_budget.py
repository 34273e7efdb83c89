"""What rendering a foreign template may cost: processor time, steps, and the size of the values it makes.

A single operation is bounded by checking sizes before it, a rendering by counting. Knows no jinja.
"""

import re
import string
import time
from collections.abc import Collection, ItemsView, KeysView, ValuesView

from potluck.core.errors import BadTemplate

MAX_VALUE_UNITS = 1 << 23  # of one value: about one unit per character, 16 per entry of a list
MAX_TOTAL_UNITS = 1 << 26  # of all values made in one rendering, kept or not
MAX_STEPS = 2_000_000
MAX_TIME_S = 2.0  # of this thread's processor time: a busy machine must not make a good template fail
MAX_DEPTH = 64
_MAX_INTEGER_BITS = 64  # beyond, numbers can be chosen to collide in hash tables
_MAX_WIDTH = 999
_MAX_PATTERN_LENGTH = 64
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # as str.splitlines has them
_LINE_OVERHEAD = 64  # of a Python string
_ENTRY_UNITS = 16
_STEPS_PER_CLOCK = 64
_BIG_UNITS = 4096

_SCALARS = (bool, float, type(None))
_LONG_NUMBER = re.compile(r"\d{4}|\*", re.ASCII)
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?([^a-zA-Z%]*)")


class Budget:
    """Counts down while a template runs; raises BadTemplate when something is used up."""

    def __init__(self) -> None:
        self._steps = 0
        self._units = 0
        self._end_s = time.thread_time() + MAX_TIME_S

    def step(self, units: int = 0) -> None:
        """One operation, on values of that many units."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise BadTemplate(f"the chat template took more than {MAX_STEPS} steps")
        # Big values are slow to work on: with them, every step looks at the clock.
        is_due = units > _BIG_UNITS or self._steps % _STEPS_PER_CLOCK == 0
        if is_due and time.thread_time() > self._end_s:
            raise BadTemplate(f"the chat template took more than {MAX_TIME_S:g} s")

    def spend(self, units: int) -> None:
        """One operation that made a value of that many units."""
        self.step(units)
        self._units += units
        if self._units > MAX_TOTAL_UNITS:
            raise BadTemplate("the chat template makes too much text")


def weigh(value: object, foreign: tuple[type, ...] = (), depth: int = 1) -> int:
    """The units of a value made of plain data; raises BadTemplate where it is too big, too deep or no plain data.

    Values of the types `foreign` count as one. Lists within lists share their entries, so that a few lines can make a
    value that is small in memory and endless when printed or compared: entries count as often as they are seen.
    """
    if isinstance(value, str):
        return _limited(len(value) + 1)
    if isinstance(value, _SCALARS):
        return 1
    if isinstance(value, int):
        if value.bit_length() > _MAX_INTEGER_BITS:
            raise BadTemplate("the chat template makes a number of more than 64 bits")
        return 1
    if isinstance(value, list | tuple | dict | KeysView | ValuesView | ItemsView):
        return _weigh_entries(value, foreign, depth)
    if isinstance(value, (range, *foreign)):
        return 1
    raise BadTemplate(f"the chat template uses a {type(value).__name__} as if it were text")


def _weigh_entries(
    value: list[object] | tuple[object, ...] | dict[object, object] | Collection[object],
    foreign: tuple[type, ...],
    depth: int,
) -> int:
    if depth > MAX_DEPTH:
        raise BadTemplate(f"the chat template nests values more than {MAX_DEPTH} deep")
    total = _ENTRY_UNITS
    entries = (part for item in value.items() for part in item) if isinstance(value, dict) else iter(value)
    for entry in entries:
        total = _limited(total + _ENTRY_UNITS + weigh(entry, foreign, depth + 1))
    return total


def _limited(units: int) -> int:
    if units > MAX_VALUE_UNITS:
        raise BadTemplate(f"the chat template makes a value of more than {MAX_VALUE_UNITS} characters")
    return units


def check_product(left: object, right: object) -> None:
    """Before left * right."""
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return
    for repeated, count in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple) and isinstance(count, int):
            _limited(weigh(repeated) * max(count, 0))


def check_power(left: object, right: object) -> None:
    """Before left ** right."""
    if isinstance(left, int) and isinstance(right, int) and right > 0:
        _check_bits(left.bit_length() * right)


def check_percent_format(template: str, values: object) -> None:
    """Before template % values."""
    fields = _PERCENT_FIELD.findall(template)
    if any(_LONG_NUMBER.search(field) for field in fields):
        raise BadTemplate(f"the chat template formats with a width of more than {_MAX_WIDTH}")
    _limited(len(template) + len(fields) * (weigh(values) + _MAX_WIDTH))


def check_brace_format(template: str, values: object) -> None:
    """Before template.format(...)."""
    fields = [spec or "" for _, field, spec, _ in string.Formatter().parse(template) if field is not None]
    if any(_LONG_NUMBER.search(spec) or "{" in spec for spec in fields):
        raise BadTemplate(f"the chat template formats with a width of more than {_MAX_WIDTH}")
    _limited(len(template) + len(fields) * (weigh(values) + _MAX_WIDTH))


def check_replacement(text: str, old: str, new: str) -> None:
    """Before text.replace(old, new)."""
    _limited(len(text) + text.count(old) * len(new))


def check_indenting(text: str, width: int) -> None:
    """Before every line of a text is moved to the right: each is a text of its own meanwhile."""
    lines = sum(map(text.count, _LINE_ENDS))
    _limited(len(text) + lines * (width + _LINE_OVERHEAD))


def check_joining(separator: str, parts: list[object]) -> None:
    """Before separator.join(parts)."""
    _limited(weigh(parts) + len(separator) * len(parts))


def check_pattern(pattern: object) -> None:
    """Before characters are stripped, or text is searched from its end: Python needs length times length for both."""
    if isinstance(pattern, str) and len(pattern) > _MAX_PATTERN_LENGTH:
        raise BadTemplate(f"the chat template searches for more than {_MAX_PATTERN_LENGTH} characters")


def check_width(width: object) -> None:
    """Before something is indented or rounded by `width`."""
    size = len(width) if isinstance(width, str) else width
    if size is not None and not (isinstance(size, int) and -_MAX_WIDTH <= size <= _MAX_WIDTH):
        raise BadTemplate(f"the chat template uses a width of more than {_MAX_WIDTH}")


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise BadTemplate("the chat template makes a number of more than 64 bits")
