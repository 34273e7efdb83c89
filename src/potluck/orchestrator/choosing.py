"""Which shards a request uses: candidates by its rules, the pipeline of an earlier turn, replacements, stand-ins."""

import time
from collections.abc import Sequence
from typing import Literal

import msgspec

from potluck.core.errors import BadRequest, PotluckError, ShardsFull, ShardUnavailable
from potluck.net.peers import PeerLinks
from potluck.orchestrator.generation import GenerationRequest
from potluck.orchestrator.params import DistributedChatParams
from potluck.orchestrator.reuse import Kept, KeptPipelines, Resumption, reuse_key
from potluck.orchestrator.routing import ShardStore
from potluck.planner.alike import Replacer, pick_pipeline
from potluck.planner.costs import Links
from potluck.planner.cover import Candidate, Placed, check_tiling, cover_around
from potluck.planner.route import RouteRules, are_held, between_own, standby
from potluck.wire.messages import Boundary, Codec


class Choosing:
    """`store`: what is on offer; `kept`: pipelines of earlier turns."""

    def __init__(self, node: bytes, links: PeerLinks, store: ShardStore, kept: KeptPipelines) -> None:
        self.measured_links: Links | None = None  # between nodes, as the swarm tells; None: nothing was measured
        self._node, self._links, self._store, self._kept = node, links, store, kept

    def __repr__(self) -> str:
        return f"<Choosing among {self._store!r}>"

    def standbys(
        self, request: GenerationRequest, params: DistributedChatParams, stages: Sequence[Placed]
    ) -> tuple[tuple[Placed, ...], ...]:
        """Who would take over each stage if its node went now; of what this node keeps for itself, itself."""
        own = self._own(params)
        offered = self._candidates(request, params.fallback_to_local)
        offered = between_own(offered, own) if own else offered
        reachable = [candidate for candidate in offered if self._is_reachable(candidate.node)]
        rules = self._rules(request, params)
        return tuple((each,) if each in own else standby(reachable, each, rules) for each in stages)

    def resumption(self, request: GenerationRequest, params: DistributedChatParams) -> Resumption | None:
        """The pipeline of an earlier turn, where all its shards are still there and would be chosen among."""
        if not params.settings.keeps_kv or request.prompt_logprobs is not None or request.has_fixed_boundaries:
            return None
        now_s = time.monotonic()
        candidates = self._candidates(request, params.fallback_to_local, params.own_place)
        own = self._own(params)
        fit = [c for c in candidates if self._is_reachable(c.node) and not self._store.is_suspect(c.node, now_s)]

        def is_usable(kept: Kept) -> bool:
            if params.pipeline and params.pipeline != kept.stages:
                return False
            is_own_kept = all(placed in kept.stages for placed in own)
            others = [placed for placed in kept.stages if placed not in own]
            return is_own_kept and len(kept.stages) <= params.max_shards_per_request and are_held(others, fit)

        found = self._kept.find(reuse_key(request, params.activation_dtype), request.prompt, now_s, is_usable)
        if found is None or found.is_most_of(request.prompt):
            return found
        # A little in common (a system prompt) is no reason to crowd where a conversation went before.
        usual = [(placed.node, placed.stage) for placed in self.pipeline_for(request, params)]
        return found if [(placed.node, placed.stage) for placed in found.kept.stages] == usual else None

    def pipeline_for(self, request: GenerationRequest, params: DistributedChatParams) -> list[Placed]:
        """The shards that a request would use. Raises ShardUnavailable with what is missing."""
        if params.pipeline:
            problem = check_tiling([placed.stage for placed in params.pipeline], request.layer_count)
            if problem is not None:
                raise BadRequest(problem)
            return list(params.pipeline)
        candidates = self._candidates(request, params.fallback_to_local, params.own_place)
        own = self._own(params)
        reachable = [candidate for candidate in candidates if self._is_reachable(candidate.node)]
        rules = self._rules(request, params)
        placed = pick_pipeline(reachable, own, request.layer_count, rules)
        placed = placed or pick_pipeline(candidates, own, request.layer_count, rules)
        if placed is None:
            raise self._why_not(request, params, candidates, own)
        return placed

    def _why_not(
        self, request: GenerationRequest, params: DistributedChatParams, candidates: list[Candidate], own: list[Placed]
    ) -> PotluckError:
        """Which rule stood in the way, where it was not a missing layer."""
        cover = cover_around(candidates, own, request.layer_count)
        if cover is None:
            return self._store.gap(
                request.model, request.weights_sha256, request.layer_count, allows_own=params.allows_own
            )
        if len(cover) > params.max_shards_per_request:
            return ShardUnavailable(
                f"{len(cover)} shards would be needed; at most {params.max_shards_per_request} may be used"
            )
        return ShardsFull(f"every holder of some layers of {request.model} has as many streams as it takes")

    def _own(self, params: DistributedChatParams) -> list[Placed]:
        """The layers that stay at home, and how they are computed there: what others compute by may differ."""
        return [Placed(self._node, "", stage, arithmetic=params.own_arithmetic) for stage in params.own_layers]

    def _rules(self, request: GenerationRequest, params: DistributedChatParams) -> RouteRules:
        return RouteRules(
            max_shards=params.max_shards_per_request, own=self._node, allows_own_first=True, links=self.measured_links,
            activation_bytes=4 * request.hidden_size,
        )  # fmt: skip

    def _is_reachable(self, node: bytes) -> bool:
        return node == self._node or self._links.is_linked(node)

    def _candidates(
        self, request: GenerationRequest, allows_local: bool, own: Literal["last", "equal", "first"] = "last"
    ) -> list[Candidate]:
        now_s = time.monotonic()
        allows_own = allows_local or own == "equal"
        return self._store.candidates(request.weights_sha256, None, allows_own, now_s, own)

    def replacements(
        self, request: GenerationRequest, params: DistributedChatParams, replacer: Replacer,
        kept: Sequence[Placed | None], excluded: frozenset[bytes], allows_local: bool,
    ) -> list[list[Placed]] | None:  # fmt: skip
        """What goes between the stages that are kept; None where there is nothing."""
        # Where others have failed too often it is this node's turn.
        is_own_turn = allows_local and params.fallback_to_local
        offered = self._candidates(request, is_own_turn, "first" if is_own_turn else "last")
        if params.own_layers:
            offered = between_own(offered, self._own(params))
        reachable = [candidate for candidate in offered if self._is_reachable(candidate.node)]
        return replacer.replacements(kept, reachable, excluded, request.layer_count, self._rules(request, params))


def rounded(
    request: GenerationRequest, pipeline: Sequence[Placed], dtype: Codec | Literal["auto"]
) -> GenerationRequest:
    """With a boundary wherever activations go over to another stage and are rounded there. `auto` rounds nowhere (ADR 13)."""
    if request.boundaries or request.has_fixed_boundaries or dtype == "auto" or dtype == "fp32":
        return request
    boundaries = tuple(Boundary(placed.stage.start, dtype) for placed in pipeline[1:])
    return msgspec.structs.replace(request, boundaries=boundaries)
