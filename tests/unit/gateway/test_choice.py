"""One choice: which reason an answer with tool calls ends for, and what a stop string inside a call makes of it."""

import pytest

from potluck.gateway.choice import CallReader, ChoiceSettings, ChoiceStream, NamedCallReader
from potluck.gateway.events import ChoiceFinished, Event, FinishReason, ToolCallArguments
from potluck.orchestrator.frames import TokenDelta
from potluck.testing.memory_answering import MemoryAnswering, byte_tokenizer
from potluck.text.tool_calls import ToolCallParser
from tests.support.api import MESSAGES, TOOLS, app_of, post

TOKENIZER = byte_tokenizer()
ARGUMENTS = '{"city": "Oslo"}'
CALL = '{"name": "weather", "arguments": ' + ARGUMENTS + "}"
HERMES = f"<tool_call>{CALL}</tool_call>"


def events_of(calls: CallReader, text: str, stops: tuple[str, ...], first_only: bool = False) -> list[Event]:
    stream = ChoiceStream(0, TOKENIZER, ChoiceSettings(stops=stops, calls=calls, first_only=first_only))
    events: list[Event] = []
    for place, token in enumerate(TOKENIZER.encode(text, parse_special=False, add_special=False)):
        events += stream.push(TokenDelta(token, place))
        if stream.is_stopped:
            break
    return events + stream.finish("stop")


def reason_of(events: list[Event]) -> FinishReason:
    assert isinstance(events[-1], ChoiceFinished)
    return events[-1].reason


@pytest.mark.parametrize(
    ("text", "stops", "reason"),
    [
        (ARGUMENTS, (), "tool_calls"),
        (ARGUMENTS, ("slo",), "stop"),
        (ARGUMENTS, ("}",), "stop"),
        (ARGUMENTS, ("{",), "stop"),
        ("\n" + ARGUMENTS, ("{",), "stop"),
        (ARGUMENTS + "\n", ("\n",), "tool_calls"),
    ],
)
def test_a_call_that_must_be_made_is_one_to_run_only_when_it_is_whole(
    text: str, stops: tuple[str, ...], reason: FinishReason
) -> None:
    assert reason_of(events_of(NamedCallReader("weather"), text, stops)) == reason


@pytest.mark.parametrize(
    ("text", "stops", "reason"),
    [
        (HERMES, (), "tool_calls"),
        (HERMES, ("slo",), "stop"),
        (HERMES, ("}",), "stop"),
        (HERMES, ("}}",), "stop"),
        (HERMES[:-20], (), "stop"),
        (HERMES, ("</tool_call>",), "tool_calls"),
        (HERMES + " So be it.", (" be",), "tool_calls"),
        (HERMES + HERMES.replace("Oslo", "Rome"), ("Rome",), "stop"),
        (HERMES, ("name",), "stop"),
    ],
)
def test_a_call_that_was_found_is_one_to_run_only_when_it_is_whole(
    text: str, stops: tuple[str, ...], reason: FinishReason
) -> None:
    assert reason_of(events_of(ToolCallParser(["weather"]), text, stops)) == reason


def test_a_cut_in_a_call_that_is_not_shown_takes_nothing_from_the_one_that_is() -> None:
    events = events_of(ToolCallParser(["weather"]), HERMES + HERMES.replace("Oslo", "Rome"), ("Rome",), first_only=True)
    assert reason_of(events) == "tool_calls"
    assert "".join(event.text for event in events if isinstance(event, ToolCallArguments)) == ARGUMENTS


def test_clients_hear_stop_of_a_forced_call_with_a_stop_string_inside() -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "stop": ["slo"]}
    [choice] = post(app_of(MemoryAnswering(ARGUMENTS)), "/v1/chat/completions", body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "O'
