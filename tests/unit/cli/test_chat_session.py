"""A conversation without its terminal: commands, lines that belong together, what is kept."""

import pytest

from potluck.cli.chat import AnswerStream, figures_line
from potluck.cli.chat_session import AnswerFigures, Ask, ChatSession, Choose, End, LineGatherer, ListModels, Save, Say
from potluck.cli.console import harmless
from potluck.client import Finished, ShardFailover, Text, Usage

FIGURES = AnswerFigures(9, 21, 0.2, 2.0, 1, 120.0, ("aa" * 32, "bb" * 32))


def gathered(*lines: str) -> list[str | None]:
    gatherer = LineGatherer()
    return [gatherer.add(line) for line in lines]


def test_lines_belong_together_between_fences_and_after_a_backslash() -> None:
    assert gathered("one") == ["one"]
    assert gathered("one \\", "two") == [None, "one \ntwo"]
    assert gathered('"""', "one", "", "two\\", '"""') == [None, None, None, None, "one\n\ntwo\\"]
    assert gathered('"""one', 'two"""', "three") == [None, "one\ntwo", "three"]
    assert gathered('"""all in one"""') == ["all in one"]


def test_an_open_fence_can_be_dropped() -> None:
    gatherer = LineGatherer()
    gatherer.add('"""')
    assert gatherer.is_open
    gatherer.drop()
    assert not gatherer.is_open
    assert gatherer.add("fresh") == "fresh"


def test_what_was_begun_when_the_lines_end_is_not_lost() -> None:
    gatherer = LineGatherer()
    gatherer.add('"""one')
    gatherer.add("two")
    assert gatherer.rest() == "one\ntwo"
    assert not gatherer.is_open


def test_questions_and_answers_become_the_next_questions_messages() -> None:
    session = ChatSession("m", "Be brief.")
    assert session.enter("Hello") == Ask()
    session.answered("Hi", FIGURES)
    session.enter("Again")
    assert [message["role"] for message in session.messages] == ["system", "user", "assistant", "user"]
    session.unanswered()
    assert session.messages[-1]["content"] == "Hi"
    assert session.saved()["answers"] == [FIGURES]


@pytest.mark.parametrize(
    ("text", "deed"),
    [
        ("/model", ListModels()), ("/save /tmp/x", Save("/tmp/x")), ("/exit", End()), ("", None), ("   ", None),
        ("/colour", Say("there is no /colour; /help lists the commands")), ("/save", Say("say where to: /save FILE")),
    ],
)  # fmt: skip
def test_commands(text: str, deed: object) -> None:
    assert ChatSession("m").enter(text) == deed


def test_reset_keeps_the_system_message_and_system_begins_anew() -> None:
    session = ChatSession("m", "Be brief.")
    session.enter("Hello")
    session.enter("/reset")
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    session.enter("Hello")
    session.enter("/system Rhyme.")
    assert session.messages == [{"role": "system", "content": "Rhyme."}]
    session.enter("/system")
    assert session.messages == []
    assert session.enter("/model other") == Choose("other")


def test_a_text_of_several_lines_is_no_command() -> None:
    assert ChatSession("m").enter("/etc/hosts\nwhat is in it?") == Ask()


def test_figures_come_from_usage_and_a_stopped_answer_counts_its_pieces(capsys: pytest.CaptureFixture[str]) -> None:
    stream = AnswerStream()
    stream.take(Text("Hi"), 10.0)
    stream.take(ShardFailover(("a",), ("b",), 1, 120.0, 5, "replay"), 10.5)
    stream.take(Text(" there"), 12.0)
    stopped = stream.figures()
    assert (stopped.completion_tokens, stopped.failovers, stopped.seconds) == (2, 1, 2.0)
    stream.take(Finished("stop"), 12.0)
    stream.take(Usage(9, 21, 1, 120.0, ("aa" * 32, "bb" * 32)), 12.0)
    told = capsys.readouterr()
    assert told.out == "Hi there"
    assert "failover: a → b, pause 120 ms" in told.err
    assert "21 tokens, 10.0 tokens/s" in figures_line(stream.figures())
    assert "aaaaaaaa → bbbbbbbb, 1 failover (120 ms)" in figures_line(stream.figures())


def test_what_a_model_writes_cannot_command_the_terminal() -> None:
    assert harmless("a\x1b[2Jb\n\tc\u200d\x07") == "a [2Jb\n\tc\u200d "
