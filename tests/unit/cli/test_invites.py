"""Where an invite is taken from, and what may be pasted around it."""

import io

import pytest

from potluck.cli.invite_text import read_invite
from potluck.cli.main import run
from potluck.core.errors import BadInvite, BadRequest
from potluck.trust.invites import Invite, encode_invite

INVITE = Invite(b"s" * 16, b"i" * 32, b"n" * 8, b"x" * 16, 1_900_000_000, ("10.0.0.7:7475", "[fe80::1]:7475"))
TEXT = encode_invite(INVITE)


@pytest.mark.parametrize("arguments", [[], ["-"]])
@pytest.mark.parametrize(
    "piped", [f"potluck join {TEXT}\nmore", f"\n{TEXT}\n", f"{TEXT[:60]}\n{TEXT[60:]}\nmore", f"> {TEXT}"]
)
def test_an_invite_comes_from_a_pipe_so_that_no_process_list_shows_it(
    arguments: list[str], piped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    assert read_invite(arguments) == INVITE


@pytest.mark.parametrize(
    "arguments",
    [
        [TEXT], [TEXT.upper()], [f"{TEXT[:60]}\n{TEXT[60:]}"], [f"{TEXT[:60]} \r\n  {TEXT[60:]}"], [TEXT[:60], TEXT[60:]],
        [f"'{TEXT}'"], [f'"{TEXT}"'], [f"“{TEXT}”"], [f"‘{TEXT}’"], [f"`{TEXT}`"], [f"\ufeff{TEXT}\u200b"],
        [TEXT.replace("-", "–")], ["potluck", "join", TEXT], [f"potluck join {TEXT}"], [f"'potluck join {TEXT}'"],
        ["potluck", "join", f"'{TEXT}'"], ["potluck", "join", "potluck", "join", TEXT],
    ],
)  # fmt: skip
def test_an_argument_may_be_broken_quoted_or_the_whole_line(arguments: list[str]) -> None:
    assert read_invite(arguments) == INVITE


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["please", TEXT], "starts with potluck-"), ([TEXT[8:]], "starts with potluck-"), ([TEXT[:60]], "cut short"),
        ([TEXT, "now"], "altered or cut short"), ([TEXT, TEXT], "does not contain"),
    ],
)  # fmt: skip
def test_anything_else_hears_what_is_wrong_and_nothing_of_the_invite(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BadInvite, match=complaint):
        read_invite(arguments)
    assert run(["join", *arguments]) != 0
    told = capsys.readouterr()
    assert TEXT[10:30] not in told.out + told.err


@pytest.mark.parametrize("piped", ["", "\n \n", "potluck join\n"])
def test_no_invite_is_a_clear_error(piped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(piped))
    with pytest.raises(BadRequest, match="no invite"):
        read_invite([])
