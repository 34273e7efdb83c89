"""The error table: every code of ours has its row, the document is the table, and statuses mean what clients take them for."""

import re
from pathlib import Path

from potluck.core import errors
from potluck.core.errors import GenerationAborted, NodeFailed, PotluckError, QueueFull
from potluck.gateway.error_table import TABLE, openai_error, rendered_table, row_of

HEARTHNET = {"experimental_disabled", "shard_unavailable", "pipeline_stalled", "weights_mismatch", "bad_request"}

OWN_CODE = (GenerationAborted, NodeFailed)


def all_errors(kind: type[PotluckError] = PotluckError) -> list[type[PotluckError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in all_errors(child))]


def test_every_error_of_ours_has_its_row() -> None:
    codes = {kind.code for kind in all_errors() if kind.__module__ == "potluck.core.errors"}
    assert codes <= set(TABLE)
    assert set(TABLE) >= HEARTHNET


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """Each class with its code, or in brackets where each instance has its own; children under their parents."""
    shown = [re.match(r"([│├└─ ]*)(\w+) *(\S*)", line) for line in (errors.__doc__ or "").splitlines() if "── " in line]
    drawn = [(len(match[1]) // 4, match[2], match[3]) for match in shown if match is not None]
    parents: dict[int, str] = {0: "PotluckError"}
    for depth, name, code in drawn:
        kind = getattr(errors, name)
        parents[depth] = name
        assert kind.__bases__[0].__name__ == parents[depth - 1]
        assert code == ("(the" if kind in OWN_CODE else kind.code)
    known = {kind.__name__ for kind in all_errors() if kind.__module__ == "potluck.core.errors"}
    assert {name for _, name, _ in drawn} | {"PotluckError"} == known


def test_the_document_is_made_from_the_table() -> None:
    document = Path(__file__).parents[3] / "docs" / "errors.md"
    assert document.read_text() == rendered_table()


def test_full_and_busy_say_when_to_come_again() -> None:
    assert all(row.retry_after_s is not None for row in TABLE.values() if row.status in (429, 503, 504))
    assert row_of(QueueFull("full", 17)).retry_after_s == 17


def test_an_aborted_generation_keeps_its_code_and_an_unknown_fault_tells_nothing() -> None:
    assert row_of(GenerationAborted("pipeline_stalled", "x")).status == 504
    shown = openai_error(ValueError("a secret"))
    assert (row_of(ValueError()).status, "secret" in str(shown)) == (500, False)
