"""Weights from peers, for real: daemons on loopback over TLS, one of them with wrong bytes on its disk; then the same bits and tokens."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from potluck.core.errors import WeightsUnavailable
from potluck.core.layers import LayerRange
from potluck.core.paths import locate_folders
from potluck.core.sampling_params import SamplingParams
from potluck.engine.cpu_engine import CpuEngine, EngineSettings, Step
from potluck.net.loop import run
from potluck.node.asking import RemoteModel
from potluck.node.node import Node
from potluck.node.serving import ServingSettings, parse_stage, read_stored_model, serve
from potluck.node.weight_fetch import FetchReport, WeightFetch, WeightSource
from potluck.orchestrator.params import DistributedChatParams
from potluck.planner.cover import Placed
from potluck.testing.local_swarm import LocalNode, NodePlan
from potluck.testing.lying_home import make_lying_home
from potluck.weights.catalogue import DEFAULT_MODEL_ID
from potluck.weights.checkpoint import Checkpoint
from potluck.weights.peer_fetch import FetchSettings
from potluck.weights.store import ModelStore
from tests.support.swarms import TINY, frames_of, head_node, stored_tiny, tokens_of

SOURCES = 5


@pytest.fixture(scope="module")
def lying_home(models_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose tiny model has the right manifest and, in every tensor, wrong bytes. Compiled kernels are shared."""
    stored_tiny(models_home)
    folders = locate_folders({"POTLUCK_HOME": str(models_home)})
    return make_lying_home(tmp_path_factory.mktemp("liar"), TINY, folders)


@pytest.fixture
def sources(models_home: Path, lying_home: Path, tmp_path: Path) -> Iterator[list[LocalNode]]:
    """All have every layer's bytes, and the first serves them; the last of them lies."""
    stored_tiny(models_home)
    with ExitStack() as stack:
        nodes = []
        for number in range(SOURCES):
            home = lying_home if number == SOURCES - 1 else models_home
            node = LocalNode(NodePlan("0-output" if number == 0 else "0-0"), TINY, tmp_path, number, home=home)
            stack.callback(node.end)
            nodes.append(node)
            if number == 0:  # kernels are compiled once, not by all at the same time
                node.wait_until_serving()
        for node in nodes[1:]:
            node.wait_until_serving()
        yield nodes


def source_of(node: LocalNode) -> WeightSource:
    assert node.announcement is not None
    return WeightSource(bytes.fromhex(node.announcement.node), node.address)


async def fetched(
    node: Node, store: ModelStore, entry_of: ModelStore, model: str, layers: str | None, sources: Sequence[WeightSource]
) -> FetchReport:
    entry = entry_of.find(model)
    stage = parse_stage(layers, entry.layer_count)
    return await WeightFetch(
        node.transport,
        store,
        model_id=model,
        weights_sha256=entry.weights_sha256,
        stage=stage,
        sources=sources,
        settings=FetchSettings(window_requests=2),
    ).run()


def test_an_empty_node_gets_its_layers_from_peers_of_which_one_lies_then_answers_identically(
    models_home: Path, tmp_path: Path, sources: list[LocalNode]
) -> None:
    store, original = ModelStore(tmp_path / "empty"), ModelStore(models_home / "models")
    peers = [source_of(node) for node in sources]

    async def play() -> tuple[FetchReport, list[int], list[int]]:
        async with head_node([]) as newcomer:
            with pytest.raises(WeightsUnavailable, match="wrong_bytes"):
                await fetched(newcomer, store, original, TINY, None, peers[-1:])
            assert store.find(TINY).held == "nothing"
            report = await fetched(newcomer, store, original, TINY, None, peers)
            stored = read_stored_model(store, TINY)
            stage = parse_stage(None, 8)
            server = serve(newcomer, stored, stage, ServingSettings())
            await server.start()
            address = await newcomer.listen("127.0.0.1:0")
            async with head_node([address, sources[0].address]) as head:
                model = await RemoteModel.find(head, TINY)
                request = model.request(range(1, 40), SamplingParams(), 48)
                answers = [
                    tokens_of(await frames_of(head, request, DistributedChatParams(pipeline=(placed,))))
                    for placed in (Placed(newcomer.id, address, stage), Placed(peers[0].node, peers[0].address, stage))
                ]
            return report, *answers

    report, ours, theirs = run(play())
    assert ours == theirs
    assert len(ours) == 48
    assert store.find(TINY).held == "0-output"
    assert report.size_bytes == sum(entry.size_bytes for entry in original.open(TINY).tensors.values())
    liar = peers[-1].node
    for source in report.sources:
        assert bool(source.faults) <= (source.source == liar)
        assert not (source.source == liar and source.chunks)


def test_a_newcomer_with_some_layers_hands_them_to_the_next(models_home: Path, tmp_path: Path) -> None:
    """Over TLS: first from a whole copy, then from the copy of that copy; each serves its layers."""
    stored_tiny(models_home)
    original = ModelStore(models_home / "models")
    first, second = ModelStore(tmp_path / "first"), ModelStore(tmp_path / "second")

    async def play() -> None:
        async with head_node([]) as owner, head_node([]) as middle, head_node([]) as last:
            owner.weights.offer(read_stored_model(original, TINY).offered())
            at_owner = WeightSource(owner.id, await owner.listen("127.0.0.1:0"))
            await fetched(middle, first, original, TINY, "0-3", [at_owner])
            middle.weights.offer(read_stored_model(first, TINY).offered())
            at_middle = WeightSource(middle.id, await middle.listen("127.0.0.1:0"))
            report = await fetched(last, second, original, TINY, "1-2", [at_middle])
            assert [source.source for source in report.sources] == [middle.id]
            assert second.find(TINY).held == "1-2"

    run(play())


def forward(checkpoint: Checkpoint, layers: LayerRange, folder: Path | None) -> npt.NDArray[np.float32]:
    """What some layers, with the embedding, make of a few tokens in two steps."""
    settings = EngineSettings(layers=layers, has_embedding=True, has_output=False, cache_folder=folder, source="test")
    engine = CpuEngine(checkpoint, settings)
    try:
        session = engine.open(64)
        [first] = engine.forward([Step(session, 0, tokens=list(range(3, 40)))])
        [second] = engine.forward([Step(session, 37, tokens=[7])])
        return np.concatenate([first.hidden, second.hidden])
    finally:
        engine.close()


@pytest.mark.parametrize(("model", "layers"), [(TINY, "0-3"), (DEFAULT_MODEL_ID, "0-14")])
def test_the_engine_computes_the_same_bits_and_packs_the_same_bytes(
    model: str, layers: str, models_home: Path, tmp_path: Path
) -> None:
    stored_tiny(models_home)
    original, store = ModelStore(models_home / "models"), ModelStore(tmp_path / "models")

    async def play() -> None:
        async with head_node([]) as owner, head_node([]) as newcomer:
            owner.weights.offer(read_stored_model(original, model).offered())
            at_owner = WeightSource(owner.id, await owner.listen("127.0.0.1:0"))
            await fetched(newcomer, store, original, model, layers, [at_owner])

    run(play())
    wanted = LayerRange.parse(layers, original.find(model).layer_count)
    whole, partial = original.open(model), store.open(model)
    expected = forward(whole, wanted, tmp_path / "packed-whole")
    actual = forward(partial, wanted, tmp_path / "packed-partial")
    assert actual.tobytes() == expected.tobytes()
    packed = sorted(path.name for path in (tmp_path / "packed-whole").iterdir())
    assert packed == sorted(path.name for path in (tmp_path / "packed-partial").iterdir())
    for name in packed:
        assert (tmp_path / "packed-whole" / name).read_bytes() == (tmp_path / "packed-partial" / name).read_bytes()
    whole.close()
    partial.close()
    assert store.find(model).weights_sha256 == original.find(model).weights_sha256


def test_nothing_of_a_fetch_is_left_behind(models_home: Path, tmp_path: Path) -> None:
    stored_tiny(models_home)
    original = ModelStore(models_home / "models")

    async def play() -> None:
        async with head_node([]) as owner, head_node([]) as newcomer:
            owner.weights.offer(read_stored_model(original, TINY).offered())
            at_owner = WeightSource(owner.id, await owner.listen("127.0.0.1:0"))
            await fetched(newcomer, ModelStore(tmp_path / "0"), original, TINY, None, [at_owner])
            before, tasks = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
            for number in range(1, 6):
                await fetched(newcomer, ModelStore(tmp_path / str(number)), original, TINY, None, [at_owner])
            await asyncio.sleep(0.05)  # the accepter's ends of the links close
            assert len(os.listdir("/proc/self/fd")) <= before
            assert len(asyncio.all_tasks()) <= tasks

    run(play())
