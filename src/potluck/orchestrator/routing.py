"""The shards that are on offer, and what speaks for and against each of them. Who is chosen is the planner's business."""

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Literal

from potluck.core.errors import ShardUnavailable, WeightsMismatch
from potluck.core.exactness import KNOWN_ARITHMETICS
from potluck.net.addresses import may_be_near
from potluck.planner.cover import Candidate
from potluck.wire.messages import Described, ShardInfo

# Added to a queue's depth: spares are used where nobody else is left, suspects after them, one's own copy of a model last (or first).
_SPARES_LATER, _SUSPECTS_LATER, _OWN_APART = 1_000, 100_000, 1_000_000
# Loading costs some seconds once, which over an answer is like waiting for two more steps at each token.
_MUST_LOAD_LATER = 2
SUSPICION_S = 30.0  # what others say of a node is believed for so long: a liar can slow it down, not expel it
_MOST_SUSPECTS = 256


class ShardStore:
    """The shards on offer, by node. Fed by answers to DESCRIBE, later by the swarm's adverts."""

    def __init__(self) -> None:
        self._offers: dict[bytes, tuple[str, Described]] = {}
        self._heard_at: dict[bytes, datetime] = {}  # for people; nothing is decided by it
        self._own: set[bytes] = set()
        self._far: set[bytes] = set()  # at public addresses: used where nobody on the LAN is as idle
        self._suspected_until_s: dict[bytes, float] = {}
        # Streams that this node's own generations hold, by node and weights: now, and when that node last said how many it has.
        # What it says is some seconds old, and a burst of requests must not all go to the shard that was idle before it.
        self._streams: Counter[tuple[bytes, str]] = Counter()
        self._streams_then: dict[bytes, Counter[tuple[bytes, str]]] = {}

    def __repr__(self) -> str:
        return f"<ShardStore {len(self._offers)} nodes>"

    def put(self, node: bytes, address: str, described: Described, *, is_own: bool = False) -> None:
        self._offers[node] = (address, described)
        self._streams_then[node] = Counter({key: count for key, count in self._streams.items() if key[0] == node})
        self._heard_at[node] = datetime.now(UTC)
        (self._far.discard if may_be_near(address) else self._far.add)(node)
        self.clear_suspicion(node)
        if is_own:
            self._own.add(node)

    def offers(self) -> list[tuple[str, Described]]:
        return list(self._offers.values())

    def nodes(self) -> set[bytes]:
        return set(self._offers)

    def offer_of(self, node: bytes) -> tuple[str, Described] | None:
        return self._offers.get(node)

    def heard_at(self, node: bytes) -> datetime:
        """When its present offer came."""
        return self._heard_at[node]

    def remove(self, node: bytes) -> None:
        self._offers.pop(node, None)
        self._heard_at.pop(node, None)
        self._far.discard(node)
        self._streams_then.pop(node, None)

    def begin_streams(self, nodes: Iterable[bytes], weights_sha256: str) -> None:
        """A generation of this node uses these shards; `end_streams` with the same ones when it is over."""
        self._streams.update((node, weights_sha256) for node in nodes)

    def end_streams(self, nodes: Iterable[bytes], weights_sha256: str) -> None:
        self._streams.subtract((node, weights_sha256) for node in nodes)
        self._streams = +self._streams  # without those that are zero

    def _streams_of(self, node: bytes, info: ShardInfo) -> int:
        key = (node, info.weights_sha256)
        then = self._streams_then.get(node)
        return max(0, info.streams + self._streams[key] - (then[key] if then is not None else 0))

    def suspect(self, node: bytes, now_s: float) -> None:
        """Somebody says that it is lost: for a while others are preferred. What it says of itself clears it, and so does its work."""
        if node in self._own or node not in self._offers:
            return
        self._suspected_until_s.pop(node, None)
        self._suspected_until_s[node] = now_s + SUSPICION_S
        while len(self._suspected_until_s) > _MOST_SUSPECTS:
            del self._suspected_until_s[next(iter(self._suspected_until_s))]

    def clear_suspicion(self, node: bytes) -> None:
        self._suspected_until_s.pop(node, None)

    def is_suspect(self, node: bytes, now_s: float) -> bool:
        return now_s < self._suspected_until_s.get(node, now_s)

    def models(self) -> dict[tuple[str, str], ShardInfo]:
        """Every model that is on offer, by name and hash, with one of its shards as an example."""
        return {(i.model, i.weights_sha256): i for _, described in self._offers.values() for i in described.shards}

    def holders(self, weights_sha256: str) -> list[bytes]:
        return [
            node
            for node, (_, described) in self._offers.items()
            if any(i.weights_sha256 == weights_sha256 for i in described.shards)
        ]

    def candidates(
        self, weights_sha256: str, arithmetic: int | None, allows_own: bool, now_s: float = float("inf"),
        own: Literal["last", "equal", "first"] = "last",
    ) -> list[Candidate]:  # fmt: skip
        """Shards of exactly this model, whatever its name. One's own come only where they are allowed, in the place that `own` says.

        `arithmetic` None: of any that is known here. Without a time nobody is suspect.
        """
        found = []
        for node, (address, described) in self._offers.items():
            for info in described.shards:
                wanted = KNOWN_ARITHMETICS if arithmetic is None else (arithmetic,)
                is_same = info.weights_sha256 == weights_sha256 and info.arithmetic in wanted
                is_own = node in self._own
                if is_same and (allows_own or not is_own):
                    depth = info.queue_depth + (_SPARES_LATER if info.is_spare else 0)
                    depth += (
                        0 if info.is_loaded or is_own else _MUST_LOAD_LATER
                    )  # one's own is known from before it loaded
                    depth += _SUSPECTS_LATER if self.is_suspect(node, now_s) else 0
                    if (own == "last" and is_own) or (own == "first" and not is_own):
                        depth += _OWN_APART
                    found.append(
                        Candidate(
                            node, address, info.stage, depth, info.step_us, is_local=node not in self._far,
                            streams=self._streams_of(node, info), max_streams=info.max_streams,
                            is_spare=info.is_spare, arithmetic=info.arithmetic,
                        )
                    )  # fmt: skip
        return found

    def gap(
        self, model: str, weights_sha256: str, layer_count: int, *, allows_own: bool = True
    ) -> WeightsMismatch | ShardUnavailable:
        """Why there is no pipeline: which layers nobody holds, or that other weights are on offer under that name."""
        held = [False] * layer_count
        names = {i.weights_sha256 for _, d in self._offers.values() for i in d.shards if i.model == model}
        for node, (_, described) in self._offers.items():
            for info in described.shards:
                if info.weights_sha256 == weights_sha256 and (allows_own or node not in self._own):
                    for layer in range(info.stage.start, min(info.stage.stop, layer_count)):
                        held[layer] = True
        if names and weights_sha256 not in names and not any(held):
            return WeightsMismatch(f"nobody holds {model} with weights {weights_sha256[:12]}")
        missing = [str(layer) for layer, is_held in enumerate(held) if not is_held]
        what = f"holds layer {', '.join(missing)} of" if missing else "has the ends of"
        is_forbidden = not allows_own and not self._own.isdisjoint(self.holders(weights_sha256))
        own = "; this machine's own may not be used (fallback_to_local, allow_self_as_shard)" if is_forbidden else ""
        return ShardUnavailable(f"no shard {what} {model}{own}")
