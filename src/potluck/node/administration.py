"""A swarm's node as its page and its user's commands see it: state, news, invites, plans, leaving, and faults on demand."""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from potluck import __version__
from potluck.core.errors import BadRequest, ShardUnavailable
from potluck.core.limits import ARITHMETIC_VERSION
from potluck.core.memory import memory_available_bytes
from potluck.gateway.administration import Administration
from potluck.gateway.page_state import (
    ApiFacts,
    AssignmentView,
    ChaosReply,
    ChaosRequest,
    InviteReply,
    InviteRequest,
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
from potluck.identity.keys import short_id
from potluck.node.bulk_peer import WeightSource
from potluck.node.duty import ModelDuty
from potluck.node.link_measuring import LinkMeasure, LinkMeasuring
from potluck.node.swarm_node import News, SwarmNode
from potluck.orchestrator.tracing import TraceSummary, TraceView
from potluck.orchestrator.watching import Watched
from potluck.swarm.adverts import CPU
from potluck.swarm.service import steady_clock_s
from potluck.swarm.upkeep import ShardPhase
from potluck.swarm.view import Seen
from potluck.trust.invites import encode_invite
from potluck.trust.records import Trust
from potluck.wire.messages import Chaos, ShardInfo

_KINDS: dict[str, NewsKind] = {
    "joined": "joined", "returned": "joined", "lost": "lost", "left": "left", "expelled": "left", "plan": "plan",
    "failover": "failover", "duplicate": "lost",
}  # fmt: skip
_WORDS = {
    "joined": "joined", "returned": "is back", "lost": "is lost", "left": "left", "expelled": "was expelled",
    "duplicate": "runs twice: two machines use the same key (a copied home folder?)",
}  # fmt: skip
_MOST_INVITE_S, _MOST_USES = 365 * 86_400, 1_000


class NodeAdministration(Administration):
    """`on_left` is called when the node has drained on request and may end."""

    def __init__(
        self, swarm: SwarmNode, api_url: str, needs_key: bool, allows_chaos: bool, on_left: Callable[[], None]
    ) -> None:
        self._swarm, self.api_url, self._needs_key, self._on_left = swarm, api_url, needs_key, on_left
        self._allows_chaos = allows_chaos
        self._ending: asyncio.TimerHandle | None = None
        self._names: dict[bytes, str] = {}  # also of those that have gone; as many as there were members
        self._measuring = LinkMeasuring(swarm.node.transport)

    @property
    def allows_chaos(self) -> bool:
        return self._allows_chaos

    # ------------------------------------------------------------ looking

    def state(self) -> PageState:
        swarm, roster = self._swarm, self._swarm.keeper.roster
        return PageState(
            swarm=SwarmFacts(roster.swarm.hex(), roster.name, swarm.node.id.hex()), now_ms=int(time.time() * 1000),
            models=tuple(self._model(duty) for duty in swarm.steward.duties.values()), nodes=tuple(self._nodes()),
            links=tuple(self._links()), requests=tuple(self._request(each) for each in swarm.node.orchestrator.watched()),
            plan=self._plan(), chaos=self._allows_chaos, api=ApiFacts(f"{self.api_url}/v1", self._needs_key),
        )  # fmt: skip

    def _model(self, duty: ModelDuty) -> ModelView:
        view, costs = self._swarm.view, duty.costs
        gaps = [] if view is None else view.gaps(costs.model, costs.weights_sha256, costs.layer_count)
        has_ends = (False, False) if view is None else view.has_ends(costs.model, costs.weights_sha256)
        missing = tuple(str(gap) for gap in gaps)
        if not missing and not all(has_ends):
            missing = ("embedding",) * (not has_ends[0]) + ("output",) * (not has_ends[1])
        can_answer = view is not None and not missing
        verdict = (
            f"{costs.model} can answer."
            if can_answer
            else f"{costs.model} cannot answer: nobody serves {', '.join(missing)}."
        )
        return ModelView(
            costs.model, costs.weights_sha256, costs.layer_count, can_answer, verdict, missing,
            "" if can_answer else self._fix(duty),
        )  # fmt: skip

    def _fix(self, duty: ModelDuty) -> str:
        if duty.problem:
            return duty.problem
        if duty.fetching is not None or duty.is_loading:
            return "Layers are being fetched or loaded; it will not be long."
        return "Wait for a machine to load them, or add one: potluck invite, and potluck join there."

    def _nodes(self) -> list[NodeView]:
        view = self._swarm.view
        return [] if view is None else [self._node(seen) for seen in view.nodes.values()]

    def _node(self, seen: Seen) -> NodeView:
        advert, roster = seen.advert, self._swarm.keeper.roster
        state = "leaving" if advert.is_draining or advert.is_leaving else "online"
        if self._swarm.view is None or not self._swarm.view.is_usable(advert.node):
            state = "lost"
        trust = "founder" if advert.node == roster.founder else "trusted" if roster.may_serve(advert.node) else "member"
        shards = self._own_shards() if seen.is_own else [_shard(info, "serving") for info in advert.shards]
        if seen.is_own and not shards and any(duty.fetching for duty in self._swarm.steward.duties.values()):
            state = "joining"
        return NodeView(
            advert.node.hex(), advert.name, seen.address, seen.is_own, state, trust, advert.software,  # type: ignore[arg-type]
            self._memory(seen), None if seen.is_own else seen.rtt_us / 1000, max(0.0, steady_clock_s() - seen.first_seen_s),
            tuple(shards), advert.device,
        )  # fmt: skip

    def _own_shards(self) -> list[ShardView]:
        names = {ShardPhase.LOADING: "loading", ShardPhase.SERVING: "serving", ShardPhase.DRAINING: "draining"}
        duties = self._swarm.steward.duties.values()
        return [_shard(server.info(), names[phase]) for duty in duties for server, phase in duty.shards.items()]

    def _memory(self, seen: Seen) -> MemoryView:
        advert = seen.advert
        costs = {duty.costs.weights_sha256: duty.costs for duty in self._swarm.steward.duties.values()}
        model = sum(costs[s.weights_sha256].weight_bytes(s.stage) for s in advert.shards if s.weights_sha256 in costs)
        total = advert.memory_total_bytes
        is_here = seen.is_own and advert.device == CPU
        free = memory_available_bytes() if is_here else max(0, advert.memory_budget_bytes - model)
        return MemoryView(total, model, 0, min(free, max(0, total - model)))

    def _links(self) -> list[LinkView]:
        view = self._swarm.view
        if view is None:
            return []
        return [
            LinkView(
                seen.advert.node.hex(), figures.node.hex(), figures.rtt_us / 1000, figures.bandwidth_bytes_s * 8 / 1e6
            )
            for seen in view.nodes.values()
            for figures in seen.advert.links
        ]

    def _request(self, watched: Watched) -> RequestView:
        stages = tuple(
            StageView(
                placed.node.hex(), placed.stage.start, placed.stage.stop - 1, timing.compute_ms, timing.queue_ms, timing.wire_ms,
                tuple(each.node.hex() for each in standbys),
            )
            for placed, timing, standbys in zip(watched.stages, watched.stage_timings, watched.standbys, strict=False)
        )  # fmt: skip
        return RequestView(
            watched.id, watched.model, watched.phase, watched.tokens, watched.tokens_per_s, watched.failovers, stages  # type: ignore[arg-type]
        )  # fmt: skip

    def _plan(self) -> PlanView | None:
        plans = [duty.plan for duty in self._swarm.steward.duties.values() if duty.plan is not None]
        if not plans:
            return None
        return PlanView(
            plans[0].tokens_per_s,
            tuple(
                AssignmentView(each.node.hex(), each.stage.start, each.stage.stop - 1, each.reason)
                for each in plans[0].assignments
                if each.stage is not None
            ),
        )

    def details(self) -> dict[str, Any]:
        roster = self._swarm.keeper.roster
        return {
            "state": self.state(),
            "members": [
                {
                    "id": member.node.hex(), "name": self._known_names().get(member.node, ""), "trust": str(member.trust),
                    "may_invite": member.may_invite, "may_expel": member.may_expel, "is_founder": member.node == roster.founder,
                }
                for member in roster.members()
            ],
            "plans": [self._plan_details(duty) for duty in self._swarm.steward.duties.values()],
            "duplicates": self._duplicates(),
            "expulsion": self._swarm.expulsion,
            "counters": dict(self._swarm.node.counters),
            "listen": self._swarm.address,
            "addresses": self._swarm.steward.statement.addresses,
            "processes": self._processes(),
            "peers": self._peers(),
            "shard_health": self._swarm.node.orchestrator.shard_health(),
            "discovery": self._discovery(),
        }  # fmt: skip

    def _processes(self) -> dict[str, Any]:
        workers = [
            {
                "shard": shard.shard_id,
                "pid": pid,
                "memory_bytes": _resident_bytes(pid),
                "kv_limit_bytes": shard.supervisor.memory_limit.kv_budget_bytes,
                "out_of_memory": shard.supervisor.memory_limit.deaths,
            }
            for shard in self._swarm.node.shards
            if (pid := shard.supervisor.pid)
        ]
        return {
            "version": __version__, "arithmetic": ARITHMETIC_VERSION, "daemon_pid": os.getpid(),
            "memory_bytes": _resident_bytes(os.getpid()), "workers": workers,
        }  # fmt: skip

    def _peers(self) -> list[dict[str, Any]]:
        """The other members that are in sight, as their adverts and our own pings tell of them."""
        view = self._swarm.view
        return [
            {
                "id": seen.advert.node.hex(), "name": seen.advert.name, "version": seen.advert.software,
                "arithmetic": seen.advert.arithmetic, "addresses": seen.advert.addresses, "is_connected": seen.is_connected,
                "is_usable": view is not None and view.is_usable(seen.advert.node),
                "rtt_ms": seen.rtt_us / 1000, "holds_weights": bool(seen.advert.held),
            }
            for seen in (view.nodes.values() if view is not None else ())
            if not seen.is_own
        ]  # fmt: skip

    def _duplicates(self) -> list[dict[str, Any]]:
        view = self._swarm.view
        found = view.duplicates if view is not None else ()
        return [{"id": each.node.hex(), "addresses": each.addresses} for each in found]

    def _discovery(self) -> dict[str, Any]:
        discovery = None if self._swarm.service is None else self._swarm.service.discovery
        if discovery is None:
            return {"is_used": False, "active": [], "broken": []}
        return {"is_used": True, "active": discovery.active, "broken": discovery.broken}

    def traces(self) -> tuple[TraceSummary, ...]:
        return self._swarm.node.orchestrator.traces.summaries()

    def trace(self, trace_id: str) -> TraceView:
        return self._swarm.node.orchestrator.traces.view(trace_id)

    async def measure(self, node: str) -> LinkMeasure:
        view = self._swarm.view
        found = [seen for seen in (view.usable() if view is not None else ()) if seen.advert.node.hex() == node]
        if not found or found[0].is_own:
            raise BadRequest("no other node of that id is in sight; `potluck status` lists them")
        [seen] = found
        if not seen.advert.held:
            raise ShardUnavailable(f"{short_id(seen.advert.node)} holds no weights to measure with")
        return await self._measuring.measure(
            WeightSource(seen.advert.node, seen.address), seen.advert.held[0].weights_sha256
        )

    def _plan_details(self, duty: ModelDuty) -> dict[str, Any]:
        plan = duty.plan
        return {
            "model": duty.costs.model, "problem": duty.problem, "objective": duty.record.objective,
            "tokens_per_s": plan.tokens_per_s if plan is not None else None,
            "throughput_per_s": plan.throughput_per_s if plan is not None else None,
            "assignments": [
                {
                    "node": each.node.hex(), "layers": None if each.stage is None else f"{each.stage.start}-{each.stage.stop - 1}",
                    "is_replica": each.is_replica, "bytes": each.load_bytes, "reason": each.reason,
                }
                for each in (plan.assignments if plan is not None else ())
            ],
        }  # fmt: skip

    # ------------------------------------------------------------ news

    def recent_news(self) -> tuple[NewsItem, ...]:
        return tuple(_item(news, self._name_of(news.node)) for news in self._swarm.news)

    def _name_of(self, node: bytes) -> str:
        """As people know it."""
        return self._known_names().get(node) or short_id(node)

    def _known_names(self) -> dict[bytes, str]:
        """A machine that is lost has no advert any more that would tell its name, and is the likeliest to be looked up."""
        view = self._swarm.view
        if view is not None:
            self._names |= {each: seen.advert.name for each, seen in view.nodes.items()}
        return self._names

    def listen(self, on_news: Callable[[NewsItem], None], on_changed: Callable[[], None]) -> Callable[[], None]:
        def told(news: News) -> None:
            on_news(_item(news, self._name_of(news.node)))

        self._swarm.on_news.append(told)
        self._swarm.on_changed.append(on_changed)

        def stop() -> None:
            self._swarm.on_news.remove(told)
            self._swarm.on_changed.remove(on_changed)

        return stop

    # ------------------------------------------------------------ doing

    def invite(self, wanted: InviteRequest) -> InviteReply:
        if not (60 <= wanted.expires_s <= _MOST_INVITE_S and 1 <= wanted.uses <= _MOST_USES):
            raise BadRequest(f"an invite is good for a minute to a year, and for 1 to {_MOST_USES} machines")
        now_s = time.time()
        invite = self._swarm.keeper.invite(
            Trust(wanted.trust),
            wanted.uses,
            int(now_s) + wanted.expires_s,
            self._swarm.steward.statement.addresses,
            now_s,
        )
        text = encode_invite(invite)
        return InviteReply(text, f"potluck join {text}")

    async def chaos(self, wanted: ChaosRequest) -> ChaosReply:
        """Has a shard of a running answer kill its own worker; that node must have been started with --chaos too."""
        target = self._named(wanted.node) if wanted.node else self._victim(wanted.request_id)
        self._swarm.node.links.send(target, None, Chaos(0))
        return ChaosReply(target.hex())

    def _named(self, node: str) -> bytes:
        """Raises BadRequest for a node that is not here: nothing would be killed."""
        view = self._swarm.view
        found = (
            [] if view is None else [each for each in view.nodes if each.hex() == node.lower() and view.is_usable(each)]
        )
        if not found:
            raise BadRequest("there is no such node in this swarm now")
        return found[0]

    def _victim(self, request_id: str | None) -> bytes:
        watched = self._swarm.node.orchestrator.watched()
        chosen = [each for each in watched if request_id in (None, each.id)]
        nodes = [placed.node for each in chosen for placed in each.stages]
        others = [node for node in nodes if node != self._swarm.node.id]
        if not nodes:
            raise ShardUnavailable("no answer is running whose shard could be killed")
        return (others or nodes)[-1]

    async def leave(self, patience_s: float) -> bool:
        if not 0 <= patience_s <= 3600:
            raise BadRequest("patience is from 0 to 3600 seconds")
        is_drained = await self._swarm.steward.leave(patience_s)
        self._ending = asyncio.get_running_loop().call_later(0.2, self._on_left)  # after the answer has gone out
        return is_drained


def _item(news: News, name: str) -> NewsItem:
    text = news.text if news.kind in ("plan", "failover") else f"{name} {_WORDS.get(news.kind, news.kind)}"
    if news.kind == "lost" and news.text:
        text += f": {news.text}"
    return NewsItem(int(news.at_s * 1000), _KINDS.get(news.kind, "plan"), text, news.node.hex())


def _resident_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def _shard(info: ShardInfo, state: str) -> ShardView:
    if state == "serving" and not info.is_loaded:
        state = "loadable"
    if state == "serving" and info.is_spare:
        state = "spare"
    stage = info.stage
    return ShardView(
        info.model, stage.start, stage.stop - 1, stage.has_embedding, stage.has_output, state, info.streams,  # type: ignore[arg-type]
        info.max_streams, info.queue_depth, info.step_us / 1000,
    )  # fmt: skip
