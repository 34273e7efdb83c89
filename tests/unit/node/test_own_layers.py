"""Which of its own layers a coordinator may name (ds4's rules), and what it is told otherwise."""

import pytest

from potluck.core.errors import BadRequest
from potluck.node.serving import parse_own_layers
from potluck.wire.messages import Stage


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("0-4", (Stage(0, 5, True, False),)),
        ("0-42", (Stage(0, 43, True, False),)),  # all layers, and the output elsewhere
        ("0-output", (Stage(0, 43, True, True),)),
        ("20-output", (Stage(20, 43, False, True),)),
        ("42-output", (Stage(42, 43, False, True),)),
        ("0-4,40-output", (Stage(0, 5, True, False), Stage(40, 43, False, True))),
        ("40-output, 0-4", (Stage(0, 5, True, False), Stage(40, 43, False, True))),
        ("0-19,20-output", (Stage(0, 20, True, False), Stage(20, 43, False, True))),
        ("embedding", (Stage(0, 0, True, False),)),
        ("output", (Stage(43, 43, False, True),)),
        ("embedding,output", (Stage(0, 0, True, False), Stage(43, 43, False, True))),
        ("0-4,output", (Stage(0, 5, True, False), Stage(43, 43, False, True))),
    ],
)
def test_prefix_suffix_and_both_ends_are_valid(text: str, stages: tuple[Stage, ...]) -> None:
    assert parse_own_layers(text, 43) == stages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("20-42", "layers 20-42 stop short of the output: write 20-output"),
        ("10-19", "cannot hold the middle slice 10-19"),
        ("0-4,10-19", "cannot hold the middle slice 10-19"),
        ("0-4,0-9", "one range at each end"),
        ("30-output,40-output", "one range at each end"),
        ("0-4,embedding", "one range at each end"),
        ("0-4,40-output,output", "one range at each end"),
        ("0-output,0-4", "one range at each end"),
        ("0-20,10-output", "layers 10-20 are named twice"),
        ("0-43", "go past the last one"),
        ("5-3", "the first must not be after the last"),
        ("0:4", "not a layer range"),
        ("", "not a layer range"),
        ("0-4,", "not a layer range"),
    ],
)
def test_what_cannot_be_routed_around_is_refused_with_its_own_words(text: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        parse_own_layers(text, 43)
