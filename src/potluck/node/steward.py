"""Sees to it that this node holds what the swarm's plan wants it to hold: plans, fetches weights, loads, drains, and tells the others.

Every node runs one and computes the whole plan for itself; nobody is in charge. What to do next is decided by `planner` and
`swarm/upkeep.py`; here is what takes time. Sessions that run are never disturbed by a change of plan.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping

import msgspec

from potluck import __version__
from potluck.core.errors import PlacementImpossible, PotluckError, ShardUnavailable, WeightsMissing
from potluck.core.layers import LayerRange
from potluck.core.limits import ARITHMETIC_VERSION
from potluck.identity.keys import short_id
from potluck.node.node import Node
from potluck.node.placement import covers, is_covered, kv_budget_bytes, links_of, model_costs, node_offers
from potluck.node.serving import ServingSettings, StoredModel, check_tokenizer, read_stored_model, serve
from potluck.node.weight_fetch import WeightFetch, WeightSource
from potluck.planner.hysteresis import Hysteresis
from potluck.planner.placement import Plan, plan
from potluck.shard.server import ShardServer
from potluck.swarm.adverts import MAX_HELD, MAX_SHARDS, MAX_SPEEDS, Advert, HeldWeights, LayerSpeed, LinkFigures
from potluck.swarm.steady_figure import SteadyFigure
from potluck.swarm.upkeep import Action, Deed, Held, ShardPhase, next_actions
from potluck.swarm.view import View
from potluck.trust.records import ServedModel
from potluck.trust.roster import Roster
from potluck.weights.manifest import Manifest, decode_manifest
from potluck.weights.progress import Progress
from potluck.weights.store import ModelStore
from potluck.wire.messages import ShardInfo, Stage

_LOG = logging.getLogger(__name__)
ROUND_S = 1.0
_LOAD_NEWS_S = 5.0  # between adverts that differ in nothing but how busy the shards are
_REPLAN_S = 5.0  # of a swarm that serves everything; where layers lack a holder nobody waits
_KEEP_WITHIN = 0.3  # what is held stays unless a plan is better by so much: measured figures are no better than that
_RETRY_S = (2.0, 10.0, 30.0, 60.0)  # after a fetch or load that failed
_UNWELL_AFTER = 2  # such failures in a row
_WELL_AFTER_S = 60.0
_STORE_LOOK_S = 5.0  # between looks whether a model has come to this disk by other ways
_LOAD_LOOK_S = 0.5  # between looks whether a worker that loads keeps dying


class StewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine gives. `bytes_per_s`: how fast it reads weights, measured at the start."""

    name: str = ""
    is_serving: bool = True
    memory_total_bytes: int
    memory_budget_bytes: int
    bytes_per_s: float
    lifetime_s: int = 120
    pinned: LayerRange | None = None
    max_layers: int = 0
    serving: ServingSettings = ServingSettings()


class ModelDuty:
    """One model of the swarm, as this node is concerned with it."""

    def __init__(self, record: ServedModel, manifest: Manifest) -> None:
        self.record, self.costs = record, model_costs(manifest, record)
        self.is_withdrawn = False
        self._manifest = manifest
        self.plan: Plan | None = None
        self.problem = ""  # why there is no plan, or what went wrong last
        self.hysteresis: Hysteresis[tuple[Stage | None]] = Hysteresis()
        self.shards: dict[ShardServer, ShardPhase] = {}
        self.fetching: Stage | None = None
        self.is_loading = False
        self.failures = 0
        self.retry_at_s = 0.0
        self.well_at_s = 0.0  # from when on failures of before are forgotten
        self.layer_us = SteadyFigure()
        self.replan_at_s = 0.0

    def __repr__(self) -> str:
        return f"<ModelDuty {self.record.subject} {list(self.shards)} {self.problem}>"

    def set_record(self, record: ServedModel) -> None:
        """What the swarm says of it now: a longer context, for one, costs more."""
        self.is_withdrawn = False
        if record != self.record:
            self.record, self.costs = record, model_costs(self._manifest, record)

    @property
    def is_busy(self) -> bool:
        """Whether weights are being fetched or loaded for it."""
        return self.fetching is not None or self.is_loading

    @property
    def wanted(self) -> Stage | None:
        return self.hysteresis.followed[0] if self.hysteresis.followed is not None else None


class Steward:
    """`start` in a running loop, `stop` before the node ends. `publish` is told the node's advert when it changes."""

    def __init__(
        self, node: Node, store: ModelStore, settings: StewardSettings, roster: Callable[[], Roster],
        publish: Callable[[Advert], None], link_figures: Callable[[], tuple[LinkFigures, ...]],
        progress: Callable[[], Progress | None] = lambda: None, say: Callable[[str], None] = _LOG.info,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.addresses: tuple[str, ...] = ()
        self.is_leaving = False
        self.duties: dict[str, ModelDuty] = {}  # by weights hash
        self.on_changed: Callable[[], None] = lambda: None
        self._node, self._store, self._roster = node, store, roster
        self._publish, self._link_figures, self._progress, self._say = publish, link_figures, progress, say
        self._stored: dict[str, StoredModel | None] = {}
        self._manifests: dict[str, bytes] = {}  # of models whose weights are elsewhere
        self._looking: set[str] = set()  # for the manifests of these weights
        self._view: View | None = None
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._advert: Advert | None = None
        self._advert_s = 0.0
        self._store_look_s = 0.0
        self._rtts_us: dict[bytes, SteadyFigure] = {}
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<Steward {list(self.duties.values())}, {len(self._tasks)} tasks>"

    def start(self) -> None:
        self._own(self._run())

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_view(self, view: View) -> None:
        self._view = view
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    async def leave(self, patience_s: float) -> bool:
        """Gives everything up once others serve it and its sessions have ended; whether that was so within the time."""
        self.is_leaving = True
        deadline = self._loop.time() + patience_s
        self._tell(self._loop.time())
        while self._loop.time() < deadline:
            if not any(duty.shards for duty in self.duties.values()):
                return True
            self._wake.set()
            await asyncio.sleep(0.1)
        return False

    # ------------------------------------------------------------ rounds

    async def _run(self) -> None:
        while True:
            try:
                await self._round()
            except Exception:  # whatever it was: a node whose steward has ended would look well and do nothing
                _LOG.exception("a round of the steward failed; the next is in a second")
                await asyncio.sleep(ROUND_S)
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), ROUND_S)
            except TimeoutError:
                continue
            await asyncio.sleep(0.05)  # so that a burst of news makes one round

    async def _round(self) -> None:
        now_s = self._loop.time()
        self._tell(now_s)  # first: a plan needs this node's own advert in the view
        view = self._view
        if view is None:
            return
        served = self._served()
        await self._look_into_store(served)
        for record in served.values():
            duty = self._duty(record, view)
            if duty is not None:
                self._follow(duty, view)
        for duty in list(self.duties.values()):
            if duty.costs.weights_sha256 not in served:
                self._give_up(duty, view)
        self._tell(self._loop.time())

    def _served(self) -> dict[str, ServedModel]:
        """The swarm's models by their weights, each once: two names for the same weights are one model, under the first."""
        by_weights: dict[str, ServedModel] = {}
        if self._roster().is_expelled(self._node.id):
            return by_weights
        for record in self._roster().models():
            by_weights.setdefault(record.weights_sha256, record)
        return by_weights

    async def _look_into_store(self, served: Mapping[str, ServedModel]) -> None:
        """What of the swarm's models is on this disk: at once for a new one, and now and then, as its user may have pulled it."""
        lacking = [weights for weights in served if self._stored.get(weights) is None]
        is_new = any(weights not in self._stored for weights in lacking)
        if not lacking or (not is_new and self._loop.time() < self._store_look_s):
            return
        self._store_look_s = self._loop.time() + _STORE_LOOK_S
        held = await asyncio.to_thread(lambda: {entry.weights_sha256 for entry in self._store.list()})
        for weights in lacking:
            self._stored[weights] = None
            if weights in held:
                await self._stored_model(weights)

    def _give_up(self, duty: ModelDuty, view: View) -> None:
        """The swarm serves it no more: nobody need take over, only the sessions that run keep their shard."""
        duty.is_withdrawn = True
        duty.hysteresis = Hysteresis((None,))
        self._act(duty, view)
        if not duty.shards and not duty.is_busy:
            del self.duties[duty.costs.weights_sha256]
            self.on_changed()

    def _duty(self, record: ServedModel, view: View) -> ModelDuty | None:
        """What is known of a model; None until its manifest is."""
        duty = self.duties.get(record.weights_sha256)
        if duty is not None and duty.record.subject != record.subject:
            self._give_up(duty, view)  # its shards have the old name, by which nobody asks any more
            return None
        if duty is None:
            stored = self._stored.get(record.weights_sha256)
            manifest = self._manifests.get(record.weights_sha256) if stored is None else stored.manifest
            if manifest is None:
                self._look_for_manifest(record.weights_sha256, view)
            if manifest is None or len(self.duties) >= MAX_SPEEDS:
                return None
            duty = ModelDuty(record, decode_manifest(manifest))
            self.duties[record.weights_sha256] = duty
            if stored is not None:
                self._node.weights.offer(stored.offered())
        duty.set_record(record)
        return duty

    def _look_for_manifest(self, weights_sha256: str, view: View) -> None:
        """Beside the rounds: whoever is asked may take its time."""
        if weights_sha256 not in self._looking and (sources := self._sources(weights_sha256, view)):
            self._looking.add(weights_sha256)
            self._own(self._ask_for_manifest(weights_sha256, sources))

    async def _ask_for_manifest(self, weights_sha256: str, sources: list[WeightSource]) -> None:
        try:
            for source in sources:
                try:
                    fetched = await self._node.orchestrator.fetch_tokenizer(source.node, weights_sha256)
                    check_tokenizer(*fetched, weights_sha256)
                except (PotluckError, TimeoutError) as error:
                    _LOG.info("no manifest from %s: %s", short_id(source.node), error)
                    continue
                self._manifests[weights_sha256] = fetched[0]
                self._wake.set()
                return
            await asyncio.sleep(ROUND_S)  # before they are asked again
        finally:
            self._looking.discard(weights_sha256)

    async def _stored_model(self, weights_sha256: str) -> StoredModel | None:
        if self._stored.get(weights_sha256) is None:
            self._stored[weights_sha256] = await asyncio.to_thread(self._read_stored, weights_sha256)
        return self._stored[weights_sha256]

    def _read_stored(self, weights_sha256: str) -> StoredModel | None:
        entry = self._store.find_weights(weights_sha256)
        return None if entry is None else read_stored_model(self._store, entry.id)

    def _sources(self, weights_sha256: str, view: View) -> list[WeightSource]:
        return [
            WeightSource(seen.advert.node, seen.address, seen.advert.addresses[1:])
            for seen in view.usable()
            if not seen.is_own and any(held.weights_sha256 == weights_sha256 for held in seen.advert.held)
        ]

    # ------------------------------------------------------------ following the plan

    def _follow(self, duty: ModelDuty, view: View) -> None:
        self._look_after_workers(duty)
        roster = self._roster()
        offers = node_offers(view, duty.costs, roster.may_serve, self._taken_bytes(duty))
        try:
            duty.plan = plan(duty.costs, offers, links_of(view), duty.record.objective, keep_within=_KEEP_WITHIN)
            wanted = duty.plan.stage_of(self._node.id)
        except PlacementImpossible as error:
            # What serves now goes on serving: a part of a model is better than none when somebody returns.
            duty.plan, duty.problem = None, str(error)
            wanted = duty.wanted
        else:
            duty.problem = "" if not duty.failures or duty.shards else duty.problem
        wanted = None if self.is_leaving else wanted
        if duty.is_busy and not self.is_leaving:
            wanted = duty.wanted  # first what was begun; a plan that is still better then will be made again
        # A node that holds nothing disturbs nothing by taking something.
        is_calm = is_covered(view, duty.costs) and not self.is_leaving and duty.wanted is not None
        if not is_calm or self._loop.time() >= duty.replan_at_s:
            # News makes rounds at any moment; a change that was wanted three times within one is not wanted for long.
            duty.replan_at_s = self._loop.time() + _REPLAN_S
            duty.hysteresis = duty.hysteresis.after((wanted,), is_covered=is_calm)
        self._act(duty, view)

    def _look_after_workers(self, duty: ModelDuty) -> None:
        """A shard whose worker dies again and again serves nobody: it is given up, and others had better hold its layers."""
        for server in [server for server, phase in duty.shards.items() if phase is not ShardPhase.LOADING]:
            if server.supervisor.needs_attention:
                del duty.shards[server]
                self._own(self._node.remove_shard(server))
                self._failed(duty, f"the worker of {server.shard_id} keeps dying; is there enough memory?")
        if duty.shards and self._loop.time() >= duty.well_at_s:
            duty.failures = 0

    def _taken_bytes(self, duty: ModelDuty) -> Counter[bytes]:
        """What the plans of the models before this one take on each node; all nodes take the models in the same order."""
        taken: Counter[bytes] = Counter()
        for other in sorted(self.duties.values(), key=lambda other: other.record.subject):
            if other is duty:
                break
            if other.plan is not None and not other.is_withdrawn:
                taken.update({node: other.costs.need_bytes(stage) for node, stage in other.plan.placement})
        return taken

    def _act(self, duty: ModelDuty, view: View) -> None:
        held = [Held(server.settings.stage, phase, server.core.session_count) for server, phase in duty.shards.items()]
        actions = next_actions(
            duty.wanted, held, has_weights=lambda stage: self._has_weights(duty, stage),
            is_served_elsewhere=lambda stage: duty.is_withdrawn or covers(self._planned_stages(duty, view), stage),
            fetching=duty.fetching,
        )  # fmt: skip
        for action in actions:
            self._carry_out(duty, action, view)

    def _planned_stages(self, duty: ModelDuty, view: View) -> list[Stage]:
        """What others serve now and are to keep; what they are about to give up as well does not count."""
        return [
            holder.shard.stage
            for holder in view.holders(duty.costs.model, duty.costs.weights_sha256)
            if holder.node != self._node.id
            and holder.shard.is_loaded
            and not view.nodes[holder.node].advert.is_draining
            and (duty.plan is None or duty.plan.stage_of(holder.node) == holder.shard.stage)
        ]

    def _has_weights(self, duty: ModelDuty, stage: Stage) -> bool:
        stored = self._stored.get(duty.costs.weights_sha256)
        if stored is None:
            return False
        try:
            stored.require(stage)
        except WeightsMissing:
            return False
        return True

    def _carry_out(self, duty: ModelDuty, action: Action, view: View) -> None:
        if action.deed in (Deed.FETCH, Deed.LOAD):
            if self._loop.time() < duty.retry_at_s or duty.fetching is not None or duty.is_loading:
                return
            if action.deed is Deed.FETCH:
                duty.fetching = action.stage
                self._own(self._fetch(duty, action.stage, view))
            else:
                duty.is_loading = True
                self._own(self._load(duty, action.stage))
            return
        for server in [server for server in duty.shards if server.settings.stage == action.stage]:
            if action.deed is Deed.DROP:
                del duty.shards[server]
                self._say(f"gave up {server.shard_id}")
                self._own(self._node.remove_shard(server))
            else:
                server.core.is_draining = action.deed is Deed.DRAIN
                duty.shards[server] = ShardPhase.DRAINING if action.deed is Deed.DRAIN else ShardPhase.SERVING
        self.on_changed()

    # ------------------------------------------------------------ what takes time

    async def _fetch(self, duty: ModelDuty, stage: Stage, view: View) -> None:
        model, weights = duty.record.subject, duty.costs.weights_sha256
        sources = self._sources(weights, view)
        self._say(f"fetching layers {stage.start}-{stage.stop - 1} of {model} from {len(sources)} peers")
        try:
            report = await WeightFetch(
                self._node.transport, self._store, model_id=model, weights_sha256=weights, stage=stage, sources=sources,
                progress=self._progress(),
            ).run()  # fmt: skip
        except (PotluckError, OSError) as error:
            self._failed(duty, f"the weights of layers {stage.start}-{stage.stop - 1} cannot be had: {error}")
        else:
            self._stored.pop(weights, None)
            stored = await self._stored_model(weights)
            if stored is not None:
                self._node.weights.offer(stored.offered())
            self._say(f"fetched {report.size_bytes / 1e6:.0f} MB in {report.seconds:.1f} s")
        finally:
            duty.fetching = None
            self._wake.set()

    async def _load(self, duty: ModelDuty, stage: Stage) -> None:
        stored = self._stored[duty.costs.weights_sha256]
        assert stored is not None
        server: ShardServer | None = None
        try:
            named = msgspec.structs.replace(stored, id=duty.record.subject)
            server = serve(self._node, named, stage, self._serving_settings(duty, stage))
            duty.shards[server] = ShardPhase.LOADING
            self.on_changed()
            await self._started(server)
            duty.shards[server] = ShardPhase.SERVING
            duty.well_at_s = self._loop.time() + _WELL_AFTER_S
            self._say(f"serving {server.shard_id}")
        except (PotluckError, OSError) as error:
            self._failed(duty, str(error))
            if server is not None:
                duty.shards.pop(server, None)
                await self._node.remove_shard(server)
        finally:
            duty.is_loading = False
            self._wake.set()
            self.on_changed()

    def _serving_settings(self, duty: ModelDuty, stage: Stage) -> ServingSettings:
        """A shard that runs keeps what it was given, with its sessions; the next one gets what the plan says then."""
        budget = kv_budget_bytes(duty.costs, stage, self.settings.memory_budget_bytes)
        return msgspec.structs.replace(self.settings.serving, kv_budget_bytes=budget)

    async def _started(self, server: ShardServer) -> None:
        """Returns when it is loaded. Raises ShardUnavailable where it cannot be, or where its worker dies again and again."""
        starting = self._loop.create_task(server.start())
        try:
            while not (await asyncio.wait({starting}, timeout=_LOAD_LOOK_S))[0]:
                if server.supervisor.needs_attention:
                    raise ShardUnavailable(f"the worker of {server.shard_id} keeps dying; is there enough memory?")
            await starting
        finally:
            starting.cancel()

    def _failed(self, duty: ModelDuty, problem: str) -> None:
        pause_s = _RETRY_S[min(duty.failures, len(_RETRY_S) - 1)]
        duty.failures += 1
        duty.problem = problem
        duty.retry_at_s = self._loop.time() + pause_s
        self._say(f"{problem}; next try in {pause_s:.0f} s")

    # ------------------------------------------------------------ telling the others

    def _tell(self, now_s: float) -> None:
        advert = self._own_advert()
        is_same = self._advert is not None and _without_load(advert) == _without_load(self._advert)
        if advert == self._advert or (is_same and now_s - self._advert_s < _LOAD_NEWS_S):
            return
        self._advert, self._advert_s = advert, now_s
        self._publish(advert)

    def _own_advert(self) -> Advert:
        settings = self.settings
        duties = list(self.duties.values())[:MAX_SPEEDS]
        return Advert(
            node=self._node.id, lifetime_s=settings.lifetime_s, name=settings.name, software=__version__,
            arithmetic=ARITHMETIC_VERSION, addresses=self.addresses, shards=tuple(self._offered_shards()[:MAX_SHARDS]),
            held=tuple(self._held_weights()[:MAX_HELD]), memory_total_bytes=settings.memory_total_bytes,
            memory_available_bytes=settings.memory_budget_bytes, memory_budget_bytes=settings.memory_budget_bytes,
            speeds=tuple(LayerSpeed(duty.costs.weights_sha256, self._layer_us(duty)) for duty in duties),
            threads=settings.serving.threads, links=self._steady_links(), is_draining=self.is_leaving,
            allows_serving=settings.is_serving and not self._is_unwell() and self._roster().may_serve(self._node.id),
            pinned=(settings.pinned.start, settings.pinned.stop) if settings.pinned is not None else None,
            max_layers=settings.max_layers,
            intended=tuple(
                HeldWeights(duty.costs.weights_sha256, ((duty.wanted.start, duty.wanted.stop),))
                for duty in duties
                if duty.is_busy and duty.wanted is not None
            ),
        )  # fmt: skip

    def _is_unwell(self) -> bool:
        """It has failed to get or load what it should, more than once: until it tries again others had better plan without it."""
        now_s = self._loop.time()
        return any(duty.failures >= _UNWELL_AFTER and now_s < duty.retry_at_s for duty in self.duties.values())

    def _offered_shards(self) -> list[ShardInfo]:
        return [
            server.info()
            for duty in self.duties.values()
            for server, phase in duty.shards.items()
            if phase is ShardPhase.SERVING
        ]

    def _held_weights(self) -> list[HeldWeights]:
        held = []
        for weights, stored in self._stored.items():
            if stored is not None:
                layers = tuple((run.start, run.stop) for run in stored.held_layers())
                held.append(HeldWeights(weights, layers))
        return held

    def _layer_us(self, duty: ModelDuty) -> int:
        return duty.layer_us.after(self._measured_layer_us(duty), self._loop.time())

    def _steady_links(self) -> tuple[LinkFigures, ...]:
        measured, now_s = self._link_figures(), self._loop.time()
        self._rtts_us = {each.node: self._rtts_us.get(each.node) or SteadyFigure() for each in measured}
        return tuple(
            msgspec.structs.replace(each, rtt_us=self._rtts_us[each.node].after(each.rtt_us, now_s))
            for each in sorted(measured, key=lambda each: each.node)
        )

    def _measured_layer_us(self, duty: ModelDuty) -> int:
        """One layer for one token: measured where the shard has run, before that from the machine's reading speed.

        The output counts as the layers that it weighs as much as, as in `node_offers`: whoever holds it would look slow else, and as
        soon as it had moved the next one.
        """
        average_bytes = sum(duty.costs.layer_bytes) / duty.costs.layer_count
        for server in duty.shards:
            info, stage = server.info(), server.settings.stage
            layers = stage.stop - stage.start + (duty.costs.output_bytes / average_bytes if stage.has_output else 0.0)
            if info.step_us and stage.stop > stage.start:
                return _coarse(int(info.step_us / layers))
        return _coarse(max(1, int(average_bytes / self.settings.bytes_per_s * 1e6)))

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("the steward failed", exc_info=error)


def _coarse(microseconds: int) -> int:
    """To one significant bit and two more, so that a plan does not follow every tremor."""
    step = 1 << max(0, microseconds.bit_length() - 3)
    return max(1, (microseconds + step // 2) // step * step)


def _without_load(advert: Advert) -> Advert:
    quiet = tuple(msgspec.structs.replace(shard, streams=0, queue_depth=0, step_us=0) for shard in advert.shards)
    return msgspec.structs.replace(advert, shards=quiet)
