"""`potluck ask --via … --own-layers …`: the head computes its ends of the model itself; same text, and clear words where it cannot."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from potluck.cli.main import run as run_command
from potluck.testing.local_swarm import LocalSwarm, NodePlan
from potluck.weights.store import ModelStore
from tests.support.swarms import TINY, stored_tiny

Ask = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="module")
def swarm(models_home: Path) -> Iterator[LocalSwarm]:
    stored_tiny(models_home)
    with LocalSwarm(TINY, [NodePlan("0-4"), NodePlan("3-7")], models_home) as nodes:
        yield nodes


@pytest.fixture
def ask(models_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Exit code and JSON of `potluck ask`."""
    monkeypatch.setenv("POTLUCK_HOME", str(models_home))

    def asked(*options: str) -> tuple[int, Any]:
        code = run_command(["ask", "hello", "--model", TINY, "--max-tokens", "16", "--json", *options])
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return asked


def test_own_layers_change_no_token(ask: Ask, swarm: LocalSwarm) -> None:
    via = ("--via", ",".join(swarm.addresses), "--temperature", "0.8", "--seed", "5")
    code, unsplit = ask("--temperature", "0.8", "--seed", "5", "--threads", "1")
    assert code == 0
    code, remote = ask(*via)
    assert (code, remote["text"], len(remote["tokens"])) == (0, unsplit["text"], unsplit["completion_tokens"])
    for own in ("0-2", "5-output", "0-1,6-output", "embedding,output", "0-output"):
        code, answer = ask(*via, "--own-layers", own)
        assert (code, answer["tokens"]) == (0, remote["tokens"]), own
        assert answer["failovers"] == []


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ("5-7", "stop short of the output: write 5-output"),
        ("2-4", "cannot hold the middle slice 2-4"),
        ("0-2,0-3", "one range at each end"),
        ("0-4,3-output", "layers 3-4 are named twice"),
        ("0-8", "go past the last one"),
        ("x", "not a layer range"),
    ],
)
def test_what_cannot_be_a_heads_own_is_refused_with_its_own_words(
    own: str, words: str, ask: Ask, swarm: LocalSwarm
) -> None:
    code, answer = ask("--via", ",".join(swarm.addresses), "--own-layers", own)
    assert (code, answer["error"]["code"]) == (2, "bad_request")
    assert words in answer["error"]["message"]


def test_layers_that_nobody_holds_beside_the_heads_own_are_named(ask: Ask, swarm: LocalSwarm) -> None:
    code, answer = ask("--via", swarm.nodes[0].address, "--own-layers", "0-1")
    assert (code, answer["error"]["code"]) == (1, "shard_unavailable")
    assert "no shard holds layer 5, 6, 7" in answer["error"]["message"]


@pytest.fixture
def cut(models_home: Path) -> Iterator[LocalSwarm]:
    """Two nodes without a layer in common: what is rounded between them is the same every time."""
    with LocalSwarm(TINY, [NodePlan("0-3"), NodePlan("4-7")], models_home) as nodes:
        yield nodes


def test_what_travels_is_what_the_file_says_unless_the_command_line_says_otherwise(
    ask: Ask, cut: LocalSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(seed: int, *options: str) -> list[int]:
        asked = ask("--via", ",".join(cut.addresses), "--temperature", "1.8", "--seed", str(seed), *options)
        return cast(list[int], asked[1]["tokens"])

    # Rounding does not show in every answer.
    seed = next(seed for seed in range(1, 40) if tokens(seed) != tokens(seed, "--activation-dtype", "int8"))
    exact, coarse = tokens(seed), tokens(seed, "--activation-dtype", "int8")
    file = tmp_path / "config.toml"
    file.write_text('[research.distributed_inference]\nactivation_dtype = "int8"\n')
    monkeypatch.setenv("POTLUCK_CONFIG", str(file))
    assert tokens(seed) == coarse
    assert tokens(seed, "--activation-dtype", "auto") == exact
    code, answer = ask("--via", ",".join(cut.addresses), "--activation-dtype", "fp8")
    assert (code, answer["error"]["code"]) == (2, "bad_request")


def test_ones_own_copy_steps_in_where_others_have_a_gap_unless_the_file_forbids_it(
    ask: Ask, swarm: LocalSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HearthNet §5.4: `fallback_to_local`, with a copy that is loaded only when it comes to that."""
    _, whole = ask("--via", ",".join(swarm.addresses))
    code, answer = ask("--via", swarm.nodes[0].address)
    assert (code, answer["tokens"]) == (0, whole["tokens"])
    file = tmp_path / "config.toml"
    file.write_text("[research.distributed_inference]\nfallback_to_local = false\n")
    monkeypatch.setenv("POTLUCK_CONFIG", str(file))
    code, answer = ask("--via", swarm.nodes[0].address)
    assert (code, answer["error"]["code"]) == (1, "shard_unavailable")
    assert "no shard holds layer 5, 6, 7" in answer["error"]["message"]


def test_own_layers_need_a_copy_of_the_model(
    ask: Ask, swarm: LocalSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    code, answer = ask("--via", ",".join(swarm.addresses), "--own-layers", "0-1")
    assert (code, answer["error"]["code"]) == (1, "model_not_found")
    assert f"potluck pull {TINY}" in answer["error"]["message"]


def test_own_layers_of_other_weights_are_refused(
    ask: Ask, swarm: LocalSwarm, tmp_path: Path, models_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model under the same name on this machine."""
    from potluck.bench.random_model import RandomShape, random_model
    from potluck.weights.pull import Puller

    shape = RandomShape(
        name="other", hidden_size=64, layer_count=8, head_count=4, kv_head_count=2, head_size=16, feed_forward_size=128,
        vocabulary_size=512, context_length=128,
    )  # fmt: skip
    path = random_model(tmp_path / "made", shape, "Q4_0", lambda _: None)
    Puller(ModelStore(tmp_path / "models")).pull(str(path), TINY)
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    code, answer = ask("--via", ",".join(swarm.addresses), "--own-layers", "0-1")
    assert (code, answer["error"]["code"]) == (1, "weights_mismatch")


def test_own_layers_without_others_are_refused(ask: Ask) -> None:
    code, answer = ask("--own-layers", "0-1")
    assert (code, answer["error"]["code"]) == (2, "bad_request")
    assert "--via" in answer["error"]["message"]
