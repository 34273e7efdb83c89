"""`potluck trust`: what is named changes, what is not named stays."""

import json
from pathlib import Path

import pytest

from potluck.cli.main import run
from potluck.identity.keys import NodeKey
from potluck.node.identity_file import own_key, own_swarm_file
from potluck.trust.keeper import SwarmKeeper
from potluck.trust.records import Trust

ANNA = NodeKey.from_seed(bytes([7]) * 32)
NAMED = ("trust", ANNA.node_id.hex())


@pytest.fixture(autouse=True)
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which this machine is the founder, and Anna a trusted member without rights."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    SwarmKeeper.found(own_key(), own_swarm_file()).admit(ANNA.node_id, Trust.TRUSTED)


def held() -> tuple[str, bool, bool]:
    member = SwarmKeeper(own_key(), own_swarm_file()).roster.member(ANNA.node_id)
    assert member is not None
    return str(member.trust), member.may_invite, member.may_expel


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["--trust", "member"], ("member", True, True)), (["--may-not-invite"], ("trusted", False, True)),
        (["--may-not-expel"], ("trusted", True, False)), (["--may-invite"], ("trusted", True, True)),
    ],
)  # fmt: skip
def test_what_is_not_named_stays_as_it_was(
    typed: list[str], expected: tuple[str, bool, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*NAMED, "--may-invite"]) == 0
    assert run([*NAMED, "--may-expel"]) == 0
    assert held() == ("trusted", True, True)
    capsys.readouterr()
    assert run([*NAMED, *typed, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert held() == expected
    assert (told["trust"], told["may_invite"], told["may_expel"]) == expected


def test_the_whole_result_is_told_also_what_was_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    run([*NAMED, "--trust", "member"])
    run([*NAMED, "--may-invite"])
    run([*NAMED, "--may-expel"])
    [first, second, third] = capsys.readouterr().out.splitlines()
    assert "is member, may neither invite nor expel;" in first
    assert "is member, may invite;" in second
    assert "is member, may invite and expel;" in third


def test_nothing_is_stated_where_nothing_is_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    before = SwarmKeeper(own_key(), own_swarm_file()).roster.digest
    assert run([*NAMED]) == 2
    assert "say what is to change" in capsys.readouterr().err
    assert SwarmKeeper(own_key(), own_swarm_file()).roster.digest == before
