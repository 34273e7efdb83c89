"""Reading typed values: each kind of wrong value is named with its file and key."""

from pathlib import Path

import pytest

from potluck.core.errors import BadModelFile
from potluck.weights.fields import Fields
from potluck.weights.source_tensor import shown

VALUES = {
    "a.count": 3,
    "a.share": 0.5,
    "a.flag": True,
    "a.text": "x",
    "a.half": "a\ud800",
    "a.null": None,
    "a.nan": float("nan"),
    "a.list": [1, 2.5],
    "a.part": {"inner": 4},
}


@pytest.fixture
def fields() -> Fields:
    return Fields(VALUES, Path("model.file"), "a.")


def test_values_and_defaults(fields: Fields) -> None:
    assert fields.integer("count", 1, 3) == 3
    assert fields.number("share", 0.0, 1.0) == 0.5
    assert isinstance(fields.number("count", 0.0, 9.0), float)
    assert fields.flag("flag")
    assert fields.text("text") == "x"
    assert fields.numbers("list", 2, 0.0, 9.0) == (1.0, 2.5)
    assert fields.integer("null", 1, 9, default=7) == 7
    assert not fields.has("null")
    part = fields.section("part")
    assert part is not None
    assert part.integer("inner", 0, 9) == 4
    assert fields.section("null") is None


@pytest.mark.parametrize(
    ("method", "key", "arguments"),
    [
        ("integer", "count", (4, 9)),
        ("integer", "flag", (0, 9)),
        ("integer", "share", (0, 9)),
        ("integer", "absent", (0, 9)),
        ("number", "nan", (0.0, 1.0)),
        ("number", "text", (0.0, 1.0)),
        ("number", "flag", (0.0, 1.0)),
        ("number", "share", (1.0, 2.0)),
        ("numbers", "list", (3, 0.0, 9.0)),
        ("numbers", "list", (2, 0.0, 1.0)),
        ("numbers", "text", (1, 0.0, 1.0)),
        ("flag", "count", ()),
        ("text", "count", ()),
        ("text", "half", ()),
        ("section", "count", ()),
    ],
)
def test_wrong_values_are_named(fields: Fields, method: str, key: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(BadModelFile) as caught:
        getattr(fields, method)(key, *arguments)
    assert caught.value.file == "model.file"
    assert caught.value.field == f"a.{key}"


def test_integers_beyond_floats_are_refused() -> None:
    with pytest.raises(BadModelFile):
        Fields({"n": 10**400}, Path("f")).number("n", 0.0, 1e300)


def test_values_are_shown_short() -> None:
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown("x" * 10**6)) <= 80
    assert shown(["x" * 10**6] * 10) == "a list of 10"
