"""A made-up swarm for the page: five machines, two models, one of them incomplete. Changes only when told to; no I/O, no clock.

Times and rates in it are invented and fixed, so that pictures of the page are the same every time.
"""

import msgspec

from potluck.core.errors import BadRequest
from potluck.gateway.page_state import (
    ApiFacts,
    AssignmentView,
    LinkView,
    MemoryView,
    ModelView,
    NewsItem,
    NewsKind,
    NodeView,
    PageState,
    PlanView,
    RequestView,
    ShardView,
    StageView,
    SwarmFacts,
)

SMALL = "smollm2-135m"
LARGE = "qwen2.5-7b-instruct"
_LAYERS = {SMALL: 30, LARGE: 28}
_GIB = 1 << 30
_STARTED_MS = 1_790_000_000_000


def node_id(number: int) -> str:
    """The made-up identity of machine `number`, counted from 0; the first eight digits already differ."""
    return f"{number + 1:02x}" * 32


def _shard(
    model: str, first: int, last: int, state: str = "serving", sessions: int = 1, step_ms: float = 3.0
) -> ShardView:
    ends = (first == 0, last == _LAYERS[model] - 1)
    return ShardView(model, first, last, *ends, state, sessions, 8, 0, step_ms)  # type: ignore[arg-type]


def _node(
    number: int, name: str, gib: tuple[float, float, float], rtt_ms: float | None, *shards: ShardView
) -> NodeView:
    total, model, kv = (int(share * _GIB) for share in gib)
    return NodeView(
        node_id(number), name, f"192.168.1.{20 + number}:7475", number == 0, "online", "founder" if number == 0 else "trusted",
        "0.2.0", MemoryView(total, model, kv, total - model - kv), rtt_ms, 0.0 if number == 0 else 1.0, tuple(shards),
    )  # fmt: skip


def _first_nodes() -> tuple[NodeView, ...]:
    return (
        _node(0, "kitchen", (16, 4.2, 0.6), None, _shard(SMALL, 0, 9, step_ms=2.1), _shard(LARGE, 0, 7)),
        _node(1, "anna", (8, 2.9, 0.4), 0.8, _shard(SMALL, 10, 19, step_ms=3.4)),
        _node(2, "ben-desktop", (32, 9.1, 1.7), 1.1, _shard(SMALL, 20, 29, step_ms=1.8), _shard(LARGE, 15, 27)),
        _node(3, "attic", (16, 5.0, 0.2), 2.4, _shard(SMALL, 10, 29, "spare", 0, 4.9)),
        _node(4, "grandma", (4, 0.0, 0.0), 14.0, _shard(SMALL, 0, 14, "loadable", 0, 0.0)),
    )


def _links() -> tuple[LinkView, ...]:
    figures = {
        (0, 1): (0.8, 940),
        (0, 2): (1.1, 930),
        (0, 3): (2.4, 410),
        (0, 4): (14.0, 38),
        (1, 2): (0.9, 935),
        (2, 3): (2.2, 400),
    }
    return tuple(
        LinkView(node_id(one), node_id(other), rtt_ms, float(mbit)) for (one, other), (rtt_ms, mbit) in figures.items()
    )


class ScriptedSwarm:
    """The state that the page is shown, and the ways in which a test may change it."""

    def __init__(self, has_chaos: bool = True) -> None:
        self.nodes = {node.id: node for node in _first_nodes()}
        self.requests: dict[str, RequestView] = {}
        self.news: list[NewsItem] = []
        self.has_chaos = has_chaos

    def state(self, base_url: str, needs_key: bool) -> PageState:
        return PageState(
            SwarmFacts("5a" * 16, "Willow Street", node_id(0)), _STARTED_MS, tuple(self._model(name) for name in _LAYERS),
            tuple(self.nodes.values()), _links(), tuple(self.requests.values()), self._plan(), self.has_chaos,
            ApiFacts(f"{base_url}/v1", needs_key),
        )  # fmt: skip

    def route(self, model: str) -> tuple[StageView, ...]:
        """Stages that cover the model, servers before spares; as far as they go."""
        stages: list[StageView] = []
        layer = 0
        while layer < _LAYERS[model]:
            found = self._holder(model, layer)
            if found is None:
                break
            node, shard = found
            wire_ms = 0.0 if node.is_self else (node.rtt_ms or 0.0) / 2
            stages.append(StageView(node.id, layer, shard.last, shard.step_ms, 0.3 * len(stages), wire_ms))
            layer = shard.last + 1
        return tuple(stages)

    def say(self, kind: NewsKind, text: str, node: str | None = None) -> NewsItem:
        item = NewsItem(_STARTED_MS + 1000 * len(self.news), kind, text, node)
        self.news.append(item)
        return item

    def lose(self, node: str) -> None:
        """The machine stops answering; the swarm still remembers it."""
        self._change(node, state="lost", last_seen_s=31.0)
        self.say("lost", f"{self.nodes[node].name} stopped answering", node)

    def forget(self, node: str) -> None:
        del self.nodes[node]

    def join(self) -> str:
        """One more machine sits down, with layers that the large model lacks."""
        node = _node(5, "garage", (24, 3.3, 0.0), 1.6, _shard(LARGE, 8, 14))
        self.nodes[node.id] = node
        self.say("joined", "garage joined with layers 8–14 of " + LARGE, node.id)
        return node.id

    def kill_worker(self, node: str) -> None:
        """The machine stays, its shards have to be loaded anew."""
        shards = tuple(msgspec.structs.replace(shard, state="loading", sessions=0) for shard in self.nodes[node].shards)
        self._change(node, shards=shards)
        self.say("lost", f"The worker on {self.nodes[node].name} died; it is being restarted", node)

    def reload(self, node: str) -> None:
        shards = tuple(msgspec.structs.replace(shard, state="serving") for shard in self.nodes[node].shards)
        self._change(node, shards=shards)
        self.say("recovered", f"{self.nodes[node].name} serves its layers again", node)

    def victim(self, request_id: str | None, wanted: str | None) -> str:
        """The stage to hit: the one that is named, else the request's last one on another machine."""
        request = self.requests.get(request_id or "")
        stages = [stage.node for stage in request.stages] if request is not None else list(self.nodes)
        candidates = [node for node in stages if not self.nodes[node].is_self and wanted in (None, node)]
        if not candidates:
            raise BadRequest("no shard of that answer runs on another machine")
        return candidates[-1]

    def _change(self, node: str, **fields: object) -> None:
        self.nodes[node] = msgspec.structs.replace(self.nodes[node], **fields)

    def _holder(self, model: str, layer: int) -> tuple[NodeView, ShardView] | None:
        for state in ("serving", "spare"):
            for node in self.nodes.values():
                for shard in node.shards if node.state != "lost" else ():
                    if shard.model == model and shard.state == state and shard.first <= layer <= shard.last:
                        return node, shard
        return None

    def _model(self, name: str) -> ModelView:
        missing = [layer for layer in range(_LAYERS[name]) if self._holder(name, layer) is None]
        if not missing:
            count = len(self.route(name))
            return ModelView(
                name,
                "c0ffee" * 10 + "c0ff",
                _LAYERS[name],
                True,
                f"{name} can answer: {count} machines cover its layers.",
            )
        ranges = f"{missing[0]}-{missing[-1]}"
        return ModelView(
            name, "c0ffee" * 10 + "c0ff", _LAYERS[name], False, f"{name} cannot answer: nobody has layers {missing[0]}–{missing[-1]}.",
            (ranges,), "A machine with 2 GiB free that runs `potluck join` could take them.",
        )  # fmt: skip

    def _plan(self) -> PlanView:
        why = {0: "holds the embedding, no hop", 1: "fast link, enough memory", 2: "fastest per layer"}
        stages = self.route(SMALL)
        numbers = {node_id(number): reason for number, reason in why.items()}
        return PlanView(
            38.2,
            tuple(
                AssignmentView(stage.node, stage.first, stage.last, numbers.get(stage.node, "stands in"))
                for stage in stages
            ),
        )
