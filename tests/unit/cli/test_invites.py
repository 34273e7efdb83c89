"""Where an invite is taken from."""

import io

import pytest

from potluck.cli.swarm import _invite_text
from potluck.core.errors import BadRequest


@pytest.mark.parametrize("argument", [None, "-"])
def test_an_invite_comes_from_a_pipe_so_that_no_process_list_shows_it(
    argument: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("potluck join potluck-abc\nmore"))
    assert _invite_text(argument) == "potluck-abc"


def test_an_invite_may_still_be_an_argument() -> None:
    assert _invite_text("potluck-abc") == "potluck-abc"


def test_no_invite_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(BadRequest, match="no invite"):
        _invite_text(None)
