"""`potluck bench swarm`: a small one, start to end."""

import json

import pytest

from potluck.cli import main


def test_a_small_swarm_is_measured_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "swarm", "--nodes", "6", "--minutes", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["nodes"] == 6
    assert 0 < report["join_s"] < 2
    assert 0 < report["bytes_per_node_s"] < 400
    assert report["churn"]["ghosts"] == 0


def test_the_table_names_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "swarm", "--nodes", "5", "--minutes", "0.5"]) == 0
    told = capsys.readouterr().out
    for words in (
        "one joins",
        "killed",
        "unplugged",
        "leaves",
        "expelled",
        "partition ends",
        "per node and second",
        "ghosts: 0",
    ):
        assert words in told
