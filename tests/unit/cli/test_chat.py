"""`potluck chat` of a running node, up to its exit code: what a pipe or a terminal gives it, and what fails."""

import io
import json
from collections.abc import Iterator

import httpx
import pytest

from potluck.cli.chat import _Talk
from potluck.cli.chat_session import ChatSession
from potluck.cli.main import run
from potluck.client import Client
from tests.support.scripted_api import URL, answer, models, node_runs, question_of


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that reached the node; it has a small and a large model, and refuses what is to fail."""
    questions: list[str] = []

    def answering(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return models("small", "large")
        questions.append(question_of(request))
        if questions[-1] == "fail":
            return httpx.Response(503, json={"error": {"code": "shard_unavailable", "message": "nobody has layer 3"}})
        return answer(f"answer {len(questions)}")

    node_runs(monkeypatch, answering)
    return questions


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes, *options: str, handling: str = "surrogateescape") -> int:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8", handling))
    return run(["chat", *options])


def typed(monkeypatch: pytest.MonkeyPatch, client: Client, *lines: str | BaseException) -> _Talk:
    """A conversation at a terminal, to its end."""
    coming: Iterator[str | BaseException] = iter([*lines, EOFError()])

    def next_line(prompt: str) -> str:
        line = next(coming)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", next_line)
    talk = _Talk(client, URL, ChatSession("small"), {}, is_silent=False, is_terminal=True)
    talk.run()
    return talk


def test_an_answer_that_failed_makes_a_piped_conversation_fail_after_the_others_were_answered(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, b"fail\nhi\n") == 1
    told = capsys.readouterr()
    assert asked == ["fail", "hi"]
    assert "answer 2" in told.out
    assert "nobody has layer 3" in told.err


def test_a_piped_conversation_in_which_all_was_answered_succeeds(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert piped(monkeypatch, b"/model large\nhi\n") == 0
    assert asked == ["hi"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_model_that_is_not_on_offer_ends_a_piped_conversation_before_another_one_answers(
    options: list[str], asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, b"/model nosuch\nhi\n", *options) == 1
    told = capsys.readouterr()
    assert "offers no nosuch; there is small, large" in told.out + told.err
    assert not asked


def test_a_model_that_is_not_on_offer_is_refused_at_a_terminal_and_the_old_one_stays(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(URL) as client:
        talk = typed(monkeypatch, client, "/model nosuch", "hi")
        assert talk._session.model == "small"
        assert asked == ["hi"]
        assert "offers no nosuch" in capsys.readouterr().err
        assert typed(monkeypatch, client, "/model large")._session.model == "large"


def test_a_node_that_has_gone_does_not_end_a_conversation_at_a_terminal_when_models_are_to_be_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    node_runs(monkeypatch, gone)
    with Client(URL) as client:
        typed(monkeypatch, client, "/model", "/help")
    told = capsys.readouterr().err
    assert f"error: nothing answers at {URL}" in told
    assert "forget the conversation" in told  # it went on


@pytest.mark.parametrize(("data", "question"), [(b'"""\nab\nc\n', "ab\nc"), (b"ab\\", "ab"), (b'"""ab"""', "ab")])
def test_a_piped_text_that_is_left_open_is_asked(
    data: bytes, question: str, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert piped(monkeypatch, data) == 0
    assert asked == [question]


def test_whoever_ends_the_conversation_in_the_middle_of_a_text_is_told_that_it_was_not_asked(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Client(URL) as client:
        typed(monkeypatch, client, '"""', "ab")
    assert not asked
    assert "was not asked" in capsys.readouterr().err


@pytest.mark.parametrize("handling", ["strict", "surrogateescape"])  # what Python does depends on the locale
def test_a_piped_line_that_is_no_text_is_called_that(
    handling: str, asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, b"caf\xe9\n", handling=handling) == 2
    assert capsys.readouterr().err == "error: the question is not UTF-8 text [bad_request]\n"
    assert not asked


def test_a_line_that_is_no_text_is_an_error_object_where_json_was_asked_for(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(monkeypatch, b"caf\xe9\n", "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "the question is not UTF-8 text"


def test_typing_what_is_no_text_does_not_end_a_conversation_at_a_terminal(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = UnicodeDecodeError("utf-8", b"\xe9", 0, 1, "invalid")
    with Client(URL) as client:
        typed(monkeypatch, client, "caf\udce9", broken, "hi")
    assert asked == ["hi"]
    assert capsys.readouterr().err.count("error: the question is not UTF-8 text") == 2
