"""Schemas that would keep a shard busy for minutes are refused before anything is made of them."""

from typing import Any

import pytest

from potluck.core.errors import BadGrammar
from potluck.text.schema_limits import MAX_OPTIONAL_PROPERTIES, check_schema


def properties(count: int, required: int = 0) -> dict[str, Any]:
    names = [f"p{number}" for number in range(count)]
    return {"type": "object", "properties": {name: {} for name in names}, "required": names[:required]}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"type": "object", "properties": {"deep": {"items": {"multipleOf": 12_345.67}}}},
        {"anyOf": [{"multipleOf": 9000 + number} for number in range(60)]},
        {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]},
        {"$defs": {"a": {"multipleOf": 997}}, "$ref": "#/$defs/a", "multipleOf": 0.991},
        {"multipleOf": 1e300},
        properties(MAX_OPTIONAL_PROPERTIES + 1),
        {"items": properties(3000, required=3000 - MAX_OPTIONAL_PROPERTIES - 1)},
    ],
)
def test_what_would_take_minutes_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadGrammar):
        check_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        True, [], {}, {"multipleOf": 5}, {"multipleOf": 0}, {"multipleOf": 1e-9}, {"multipleOf": "x"}, {"multipleOf": True},
        {"anyOf": [{"multipleOf": 0.01}, {"multipleOf": 250}, {"multipleOf": -7}]}, {"properties": 5, "required": 5},
        {"allOf": [{"multipleOf": 97}, {"multipleOf": 91}]}, properties(MAX_OPTIONAL_PROPERTIES), properties(3000, required=2900),
        {"properties": {"multipleOf": {"type": "integer"}}},
    ],
)  # fmt: skip
def test_what_people_write_is_not(schema: Any) -> None:
    check_schema(schema)


def test_depth_does_not_matter() -> None:
    schema: Any = {"multipleOf": 999_983}
    for _ in range(10_000):
        schema = [schema]
    with pytest.raises(BadGrammar):
        check_schema(schema)
