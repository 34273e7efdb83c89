"""What the page is told about the swarm: the shapes of `/potluck/state`, `/potluck/events`, `/potluck/invite` and `/potluck/chaos`.

Pure data; docs/page-api.md says what each field means. `from` is a word of Python, so links have `source` and `target` here.
"""

from typing import Literal

import msgspec

NodeState = Literal["online", "lost", "leaving", "joining"]
ShardState = Literal["serving", "loading", "spare", "loadable", "draining"]
Phase = Literal["queued", "prefill", "decode", "recovering"]
NewsKind = Literal["joined", "lost", "left", "failover", "recovered", "plan"]


class SwarmFacts(msgspec.Struct, frozen=True, rename={"self_id": "self"}):
    id: str
    name: str
    self_id: str


class ModelView(msgspec.Struct, frozen=True):
    """`missing`: inclusive ranges, as people write them."""

    id: str
    weights_sha256: str
    layer_count: int
    can_answer: bool
    verdict: str
    missing: tuple[str, ...] = ()
    fix: str = ""


class MemoryView(msgspec.Struct, frozen=True):
    total_bytes: int
    model_bytes: int
    kv_bytes: int
    free_bytes: int


class ShardView(msgspec.Struct, frozen=True):
    """A range on one node; `last` is inclusive."""

    model: str
    first: int
    last: int
    has_embedding: bool
    has_output: bool
    state: ShardState
    sessions: int = 0
    max_sessions: int = 0
    queue_depth: int = 0
    step_ms: float = 0.0


class NodeView(msgspec.Struct, frozen=True):
    id: str
    name: str
    address: str
    is_self: bool
    state: NodeState
    trust: Literal["member", "trusted", "founder"]
    version: str
    memory: MemoryView
    rtt_ms: float | None
    last_seen_s: float
    shards: tuple[ShardView, ...] = ()
    device: str = "cpu"  # what it computes on, and whose memory the figures are


class LinkView(msgspec.Struct, frozen=True, rename={"source": "from", "target": "to"}):
    source: str
    target: str
    rtt_ms: float
    mbit_s: float


class StageView(msgspec.Struct, frozen=True):
    """Mean times of a step at this stage; `wire_ms` is the way to it from the stage before, or from the head.

    `standby`: ids of the nodes that would take it over if its own went now; empty where nobody could.
    """

    node: str
    first: int
    last: int
    compute_ms: float
    queue_ms: float
    wire_ms: float
    standby: tuple[str, ...] = ()


class RequestView(msgspec.Struct, frozen=True):
    """An answer that is being written. `id` is the one in its completion's chunks."""

    id: str
    model: str
    phase: Phase
    tokens: int
    tokens_per_s: float
    failovers: int
    stages: tuple[StageView, ...] = ()


class AssignmentView(msgspec.Struct, frozen=True):
    node: str
    first: int
    last: int
    why: str


class PlanView(msgspec.Struct, frozen=True):
    expected_tokens_per_s: float
    assignments: tuple[AssignmentView, ...]


class ApiFacts(msgspec.Struct, frozen=True):
    """`base_url` ends in `/v1`."""

    base_url: str
    needs_key: bool


class PageState(msgspec.Struct, frozen=True):
    swarm: SwarmFacts
    now_ms: int
    models: tuple[ModelView, ...]
    nodes: tuple[NodeView, ...]
    links: tuple[LinkView, ...]
    requests: tuple[RequestView, ...]
    plan: PlanView | None
    chaos: bool
    api: ApiFacts


class NewsItem(msgspec.Struct, frozen=True):
    at_ms: int
    kind: NewsKind
    text: str
    node: str | None = None


class InviteRequest(msgspec.Struct, frozen=True):
    trust: Literal["member", "trusted"] = "trusted"
    expires_s: int = 86_400
    uses: int = 1


class InviteReply(msgspec.Struct, frozen=True):
    invite: str
    command: str


class ChaosRequest(msgspec.Struct, frozen=True):
    """`node`: whom to hit; None: any of the request's stages that is not this node."""

    request_id: str | None = None
    node: str | None = None


class ChaosReply(msgspec.Struct, frozen=True):
    killed: str
    what: Literal["worker", "daemon"] = "worker"
