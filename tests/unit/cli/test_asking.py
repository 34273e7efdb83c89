"""`potluck ask` of a running node, up to its exit code: what is printed, also where the node goes away or the text is none."""

import io
import json
import os

import pytest

from potluck.cli.main import run
from tests.support.scripted_api import answer, node_runs


def test_a_node_that_goes_away_in_the_middle_is_told_in_one_line_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node_runs(monkeypatch, lambda request: answer("Half an", " ans", breaks=True))
    assert run(["ask", "What?"]) == 1
    told = capsys.readouterr()
    assert told.out == "Half an ans\n"
    assert told.err.startswith("error: the node went away in the middle of the answer")
    assert "potluck up" in told.err
    assert told.err.count("\n") == 1


def test_a_node_that_goes_away_in_the_middle_is_an_error_object_where_json_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node_runs(monkeypatch, lambda request: answer("Half", breaks=True))
    assert run(["ask", "What?", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "node_went_away"


@pytest.mark.parametrize("named", [[], ["--model", "small"]])
def test_the_report_names_the_model_that_answered_also_where_none_was_named(
    named: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node_runs(monkeypatch, lambda request: answer("A", " meal"))
    assert run(["ask", "What?", "--json", *named]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["model"], told["text"], told["finish_reason"]) == ("small", "A meal", "stop")


NO_TEXT = b"a\xff\xfeb"


@pytest.mark.parametrize("options", [[], ["--here"]])
@pytest.mark.parametrize("handling", ["strict", "surrogateescape"])  # what Python does depends on the locale
def test_a_piped_question_that_is_no_text_is_called_that(
    options: list[str], handling: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node_runs(monkeypatch, lambda request: answer("never"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(NO_TEXT), "utf-8", handling))
    assert run(["ask", "-", *options]) == 2
    assert capsys.readouterr().err == "error: the question is not UTF-8 text [bad_request]\n"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([os.fsdecode(NO_TEXT)], "the question"), ([os.fsdecode(NO_TEXT), "--here"], "the question"),
        (["What?", "--system", os.fsdecode(NO_TEXT)], "--system"), (["What?", "--model", os.fsdecode(NO_TEXT)], "--model"),
    ],
)  # fmt: skip
def test_an_argument_that_is_no_text_is_called_that(
    arguments: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node_runs(monkeypatch, lambda request: answer("never"))
    assert run(["ask", *arguments]) == 2
    assert capsys.readouterr().err == f"error: {what} is not UTF-8 text [bad_request]\n"
