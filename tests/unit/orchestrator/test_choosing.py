"""Layers that stay at home are the same ones whenever they are looked for: for the next turn, as a stand-in, and when they come back."""

import time

import msgspec
import pytest

from potluck.core.errors import BadRequest
from potluck.core.sampling_params import SamplingParams
from potluck.net.memory import MemoryNetwork
from potluck.net.peers import PeerLinks
from potluck.orchestrator.choosing import Choosing
from potluck.orchestrator.generation import GenerationRequest, GenerationSettings
from potluck.orchestrator.params import DistributedChatParams
from potluck.orchestrator.reuse import Kept, KeptPipelines, reuse_key
from potluck.orchestrator.routing import ShardStore
from potluck.planner.alike import Replacer
from potluck.planner.cover import Placed
from potluck.wire.messages import Described, ShardInfo, Stage

HEAD, GPU = b"H" * 32, b"G" * 32
OWN, FAR = Stage(0, 2, True), Stage(2, 8, False, True)
GPU_ARITHMETIC, OWN_ARITHMETIC = 1001, 1
REQUEST = GenerationRequest(
    model="m", weights_sha256="a" * 64, arithmetic=GPU_ARITHMETIC, layer_count=8, prompt=tuple(range(100)), max_tokens=8,
    params=SamplingParams(), eos=(999,),
)  # fmt: skip
PARAMS = DistributedChatParams(
    own_layers=(OWN,), own_arithmetic=OWN_ARITHMETIC, settings=GenerationSettings(keeps_kv=True)
)


class Linked(PeerLinks):
    def is_linked(self, node: bytes) -> bool:
        return True


@pytest.fixture
def kept() -> KeptPipelines:
    return KeptPipelines()


@pytest.fixture
def choosing(kept: KeptPipelines) -> Choosing:
    store = ShardStore()
    info = ShardInfo("m", "a" * 64, GPU_ARITHMETIC, 8, Stage(0, 8, True, True), True, 16, 0, 0, 1000)
    store.put(GPU, "gpu:1", Described(0, GPU, "1", (info,), 1, ()))
    return Choosing(HEAD, Linked(HEAD, MemoryNetwork().transport(HEAD), lambda *_: None, lambda *_: None), store, kept)


def test_the_next_turn_goes_on_with_ones_own_layers_too(choosing: Choosing, kept: KeptPipelines) -> None:
    stages = choosing.pipeline_for(REQUEST, PARAMS)
    assert [(placed.node, placed.stage, placed.arithmetic) for placed in stages] == [
        (HEAD, OWN, OWN_ARITHMETIC), (GPU, FAR, GPU_ARITHMETIC),
    ]  # fmt: skip
    turn = Kept(REQUEST.prompt[:80], tuple(stages), (b"a" * 16, b"b" * 16))
    kept.put(reuse_key(REQUEST, "auto"), turn, time.monotonic())
    found = choosing.resumption(REQUEST, PARAMS)
    assert found is not None
    assert found.length == 80


def test_nobody_else_stands_in_for_what_stays_at_home(choosing: Choosing) -> None:
    stages = choosing.pipeline_for(REQUEST, PARAMS)
    assert choosing.standbys(REQUEST, PARAMS, stages)[0] == (stages[0],)


def test_ones_own_layers_come_back_as_what_they_were(choosing: Choosing) -> None:
    own, far = choosing.pipeline_for(REQUEST, PARAMS)
    lost: list[Placed | None] = [None, far]
    groups = choosing.replacements(REQUEST, PARAMS, Replacer([own, far]), lost, frozenset(), allows_local=False)
    assert groups is not None
    [[back]] = [group for group in groups if group and group[0].node == HEAD]
    assert (back.stage, back.arithmetic) == (own.stage, own.arithmetic)


# ---------------------------------------------------------------- ds4: owners of KV with a gap between them

LOW, HIGH = b"L" * 32, b"U" * 32
SUFFIX = Stage(6, 8, False, True)


@pytest.mark.parametrize(
    ("high", "is_resumed"),
    [(Stage(3, 6), True), (Stage(2, 8, False, True), True), (Stage(4, 6), False), (Stage(3, 5), False), (None, False)],
)
def test_kv_owner_gap_rejection(high: Stage | None, is_resumed: bool) -> None:
    """ds4: where the owners of a prompt's KV no longer cover the model, none of it is used; here with the output at home.

    `high`: what the second of them offers by now, where it held layers 3 to 5.
    """
    store, table = ShardStore(), KeptPipelines()
    for node, stage in ((LOW, Stage(0, 3, True)), (HIGH, high)):
        if stage is not None:
            info = ShardInfo("m", "a" * 64, GPU_ARITHMETIC, 8, stage, True, 16, 0, 0, 1000)
            store.put(node, f"{node[:1].decode()}:1", Described(0, node, "1", (info,), 1, ()))
    links = Linked(HEAD, MemoryNetwork().transport(HEAD), lambda *_: None, lambda *_: None)
    params = msgspec.structs.replace(PARAMS, own_layers=(SUFFIX,))
    owners = (
        Placed(LOW, "L:1", Stage(0, 3, True)),
        Placed(HIGH, "U:1", Stage(3, 6)),
        Placed(HEAD, "", SUFFIX, arithmetic=OWN_ARITHMETIC),
    )
    turn = Kept(REQUEST.prompt[:80], owners, (b"a" * 16, b"b" * 16, b"c" * 16))
    table.put(reuse_key(REQUEST, "auto"), turn, time.monotonic())
    choosing = Choosing(HEAD, links, store, table)
    assert (choosing.resumption(REQUEST, params) is not None) == is_resumed


def test_a_pipeline_with_a_gap_between_its_owners_is_refused_with_its_layers(choosing: Choosing) -> None:
    gap = (Placed(LOW, "L:1", Stage(0, 3, True)), Placed(HEAD, "", SUFFIX))
    with pytest.raises(BadRequest, match="nobody holds layers 3-5"):
        choosing.pipeline_for(REQUEST, DistributedChatParams(pipeline=gap))
