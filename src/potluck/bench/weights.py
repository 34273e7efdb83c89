"""How fast weights come from peers: real daemons on loopback over TLS, an empty store each round, liars among the sources if wanted.

Also what that does to others: the round trip of a small message between the same two processes, at rest and during a transfer.
"""

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec

from potluck.core.paths import Folders
from potluck.identity.keys import NodeKey
from potluck.net.link import admit_anyone
from potluck.net.loop import run
from potluck.net.tls import TlsTransport
from potluck.node.node import Node
from potluck.node.serving import parse_stage
from potluck.node.weight_fetch import FetchReport, WeightFetch, WeightSource
from potluck.testing.local_swarm import LocalNode, NodePlan
from potluck.testing.lying_home import make_lying_home
from potluck.weights.store import ModelEntry, ModelStore
from potluck.wire.messages import Describe

Say = Callable[[str], None]
_PAUSE_S = 0.002  # between small messages


class WeightsBenchSettings(msgspec.Struct, frozen=True, kw_only=True):
    model: str  # as in the store
    folders: Folders
    sources: int = 5
    liars: int = 1
    rounds: int = 3


class WeightsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the rounds. Shares are thread time over wall time, so that two busy threads make 2."""

    model: str
    sources: int
    liars: int
    size_bytes: int
    megabytes_per_s: float
    best_megabytes_per_s: float
    verify_share: float
    write_share: float
    verify_megabytes_per_s: float
    wrong_chunks: int  # over all rounds; none of them was kept
    round_trip_rest_ms: float
    round_trip_busy_p50_ms: float
    round_trip_busy_p95_ms: float


class _Rounds(msgspec.Struct):
    fetches: list[FetchReport] = msgspec.field(default_factory=list)
    at_rest_s: list[float] = msgspec.field(default_factory=list)
    busy_s: list[float] = msgspec.field(default_factory=list)


def bench_weights(settings: WeightsBenchSettings, say: Say) -> WeightsReport:
    """Every process and folder that was made here is gone afterwards, also after an error."""
    entry = ModelStore(settings.folders.models).find(settings.model)
    honest = settings.sources - settings.liars
    say(f"{honest} sources with {entry.id}, {settings.liars} with wrong bytes")
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix="potluck-weights-", dir=settings.folders.models.parent)
        folder = Path(stack.enter_context(made))
        sources = stack.enter_context(_sources(settings, folder))
        rounds = run(_measure(settings, entry, sources, folder, say))
    return _summary(settings, rounds)


@contextmanager
def _sources(settings: WeightsBenchSettings, folder: Path) -> Iterator[list[WeightSource]]:
    """Nodes that serve one layer, for speed; the bytes of all are on their disk. The liars come first."""
    honest_home = settings.folders.models.parent
    with ExitStack() as stack:
        homes = [honest_home] * settings.sources
        for number in range(settings.liars):
            homes[number] = make_lying_home(folder / f"liar-{number}", settings.model, settings.folders)
        nodes: list[LocalNode] = []
        for number, home in enumerate(homes):
            # The user's own folders need not lie side by side; only a liar's home is of our making.
            named = home if home is not honest_home else None
            nodes.append(LocalNode(NodePlan("0-0"), settings.model, folder, number, home=named))
            stack.callback(nodes[-1].end)
        yield [_source(node) for node in nodes]


def _source(node: LocalNode) -> WeightSource:
    announcement = node.wait_until_serving()
    return WeightSource(bytes.fromhex(announcement.node), announcement.address)


@asynccontextmanager
async def _linked_node(source: WeightSource) -> AsyncIterator[Node]:
    key = NodeKey.generate()
    node = Node(key, TlsTransport(key, admit_anyone))
    try:
        await node.links.connect(source.address, source.node)
        yield node
    finally:
        await node.stop()


async def _measure(
    settings: WeightsBenchSettings, entry: ModelEntry, sources: Sequence[WeightSource], folder: Path, say: Say
) -> _Rounds:
    rounds = _Rounds()
    honest = sources[-1]
    async with _linked_node(honest) as node:
        for number in range(settings.rounds):
            for _ in range(50):
                rounds.at_rest_s.append(await _round_trip(node, honest.node))
            with tempfile.TemporaryDirectory(dir=folder) as empty:
                report = await _fetch_beside_messages(node, honest.node, rounds, entry, sources, Path(empty))
            rounds.fetches.append(report)
            say(f"round {number + 1}: {report.megabytes_per_s:.0f} MB/s")
    return rounds


async def _fetch_beside_messages(
    node: Node, peer: bytes, rounds: _Rounds, entry: ModelEntry, sources: Sequence[WeightSource], empty: Path
) -> FetchReport:
    fetch = WeightFetch(
        node.transport,
        ModelStore(empty),
        model_id=entry.id,
        weights_sha256=entry.weights_sha256,
        stage=parse_stage(None, entry.layer_count),
        sources=sources,
    )
    fetching = asyncio.ensure_future(fetch.run())
    try:
        while not fetching.done():
            rounds.busy_s.append(await _round_trip(node, peer))
            await asyncio.sleep(_PAUSE_S)
        return await fetching
    finally:
        fetching.cancel()
        await asyncio.gather(fetching, return_exceptions=True)


async def _round_trip(node: Node, peer: bytes) -> float:
    began_s = time.perf_counter()
    await node.orchestrator.ask(peer, Describe)
    return time.perf_counter() - began_s


def _summary(settings: WeightsBenchSettings, rounds: _Rounds) -> WeightsReport:
    fetches = rounds.fetches
    sources = list(itertools.chain.from_iterable(fetch.sources for fetch in fetches))
    busy = sorted(rounds.busy_s)
    return WeightsReport(
        model=settings.model,
        sources=settings.sources,
        liars=settings.liars,
        size_bytes=fetches[0].size_bytes,
        megabytes_per_s=statistics.median(fetch.megabytes_per_s for fetch in fetches),
        best_megabytes_per_s=max(fetch.megabytes_per_s for fetch in fetches),
        verify_share=statistics.median(fetch.verify_s / fetch.seconds for fetch in fetches),
        write_share=statistics.median(fetch.write_s / fetch.seconds for fetch in fetches),
        verify_megabytes_per_s=statistics.median(fetch.size_bytes / 1e6 / fetch.verify_s for fetch in fetches),
        wrong_chunks=sum(source.faults.get("wrong_bytes", 0) for source in sources),
        round_trip_rest_ms=statistics.median(rounds.at_rest_s) * 1000,
        round_trip_busy_p50_ms=statistics.median(busy) * 1000,
        round_trip_busy_p95_ms=busy[int(len(busy) * 0.95)] * 1000,
    )
