"""Sees to it that this node holds what the swarm's plan wants it to hold: plans, fetches weights, loads, drains, and tells the others.

Every node runs one and computes the whole plan for itself; nobody is in charge. What to do next is decided by `planner` and
`swarm/upkeep.py`; here is what takes time. Sessions that run are never disturbed by a change of plan.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine

import msgspec

from potluck.core.device_facts import DeviceFacts
from potluck.core.errors import OutOfDeviceMemory, PlacementImpossible, PotluckError
from potluck.node.device import measured_device
from potluck.node.duty import ModelDuty
from potluck.node.holdings import planned_stages, taken_bytes
from potluck.node.known_models import KnownModels, weight_sources
from potluck.node.node import Node
from potluck.node.own_statement import OwnStatement, StewardSettings
from potluck.node.placement import covers, is_covered, kv_budget_bytes, links_of, node_offers
from potluck.node.serving import ServingSettings, serve, started, trouble_of
from potluck.node.weight_fetch import WeightFetch, WeightSource
from potluck.planner.hysteresis import Hysteresis
from potluck.planner.placement import plan
from potluck.shard.server import ShardServer
from potluck.swarm.adverts import MAX_SPEEDS, Advert, LinkFigures
from potluck.swarm.upkeep import Action, Deed, Held, ShardPhase, next_actions
from potluck.swarm.view import View
from potluck.trust.records import ServedModel
from potluck.trust.roster import Roster
from potluck.weights.manifest import decode_manifest
from potluck.weights.progress import Progress
from potluck.weights.store import ModelStore
from potluck.wire.messages import Stage

_LOG = logging.getLogger(__name__)
ROUND_S = 1.0
_REPLAN_S = 5.0  # of a swarm that serves everything; where layers lack a holder nobody waits
_TELL_IMPOSSIBLE_S = 5.0
_KEEP_WITHIN = 0.3  # what is held stays unless a plan is better by so much: measured figures are no better than that
_LEAVE_LOOK_S = 0.1


class Steward:
    """`start` in a running loop, `stop` before the node ends. `publish` is told the node's advert when it changes."""

    def __init__(
        self, node: Node, store: ModelStore, settings: StewardSettings, roster: Callable[[], Roster],
        publish: Callable[[Advert], None], link_figures: Callable[[], tuple[LinkFigures, ...]],
        progress: Callable[[], Progress | None] = lambda: None, say: Callable[[str], None] = _LOG.info,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.statement = OwnStatement(node.id, settings, link_figures)
        self.duties: dict[str, ModelDuty] = {}  # by weights hash
        self.on_changed: Callable[[], None] = lambda: None
        self._node, self._store, self._roster = node, store, roster
        self._publish, self._progress, self._say = publish, progress, say
        self._view: View | None = None
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.measure_device: Callable[[str], DeviceFacts] = measured_device
        self._loop = asyncio.get_running_loop()
        self._known = KnownModels(node, store, self._loop.time, say)

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
        """Gives everything up once others serve it and its sessions have ended; whether that was so within the time.

        Where nobody is there who could take anything, only the answers that run are waited for.
        """
        self.statement.is_leaving = True
        deadline = self._loop.time() + patience_s
        self._tell(self._loop.time())
        told = ""
        while (waiting := self._reason_to_stay()) and self._loop.time() < deadline:
            if waiting != told:
                self._say(f"leaving; waiting up to {deadline - self._loop.time():.0f} s for {waiting}")
                told = waiting
            self._wake.set()
            await asyncio.sleep(_LEAVE_LOOK_S)
        return not any(duty.shards for duty in self.duties.values())

    def _reason_to_stay(self) -> str:
        """What a node that leaves waits for; empty where there is nothing."""
        servers = [server for duty in self.duties.values() for server in duty.shards]
        others = [seen.advert for seen in self._view.usable() if not seen.is_own] if self._view is not None else []
        # Whoever is unwell at the moment may be about to try again; whoever serves nothing by its owner's will is not.
        has_takers = any(
            advert.allows_serving
            and self._roster().may_serve(advert.node)
            and not (advert.is_draining or advert.is_leaving)
            for advert in others
        )
        if servers and has_takers:
            return f"others to take {', '.join(sorted(server.shard_id for server in servers))}"
        # Alone, what runs is this node's own: shards keep sessions for a next turn, which need not be waited for.
        sessions = sum(server.core.session_count for server in servers) if others else 0
        is_answering = sessions or (servers and self._node.orchestrator.watched())
        return "the answers that run to end" if is_answering else ""

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
        await self._known.look(served)
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
            manifest = self._known.manifest(record.weights_sha256)
            if manifest is None:
                self._look_for_manifest(record.weights_sha256, view)
            if manifest is None or len(self.duties) >= MAX_SPEEDS:
                return None
            duty = ModelDuty(record, decode_manifest(manifest))
            self.duties[record.weights_sha256] = duty
            if (stored := self._known.stored(record.weights_sha256)) is not None:
                self._node.weights.offer(stored.offered())
        duty.set_record(record)
        return duty

    def _look_for_manifest(self, weights_sha256: str, view: View) -> None:
        """Beside the rounds: whoever is asked may take its time."""
        if (sources := weight_sources(weights_sha256, view)) and self._known.begin_looking(weights_sha256):
            self._own(self._ask_for_manifest(weights_sha256, sources))

    async def _ask_for_manifest(self, weights_sha256: str, sources: list[WeightSource]) -> None:
        if await self._known.ask_for_manifest(weights_sha256, sources):
            self._wake.set()

    # ------------------------------------------------------------ following the plan

    def _follow(self, duty: ModelDuty, view: View) -> None:
        self._look_after_workers(duty)
        roster = self._roster()
        taken = taken_bytes(self.duties.values(), duty, view)
        offers = node_offers(view, duty.costs, roster.may_serve, taken)
        try:
            duty.plan = plan(duty.costs, offers, links_of(view), duty.record.objective, keep_within=_KEEP_WITHIN)
            wanted = duty.plan.stage_of(self._node.id)
        except PlacementImpossible as error:
            # What serves now goes on serving: a part of a model is better than none when somebody returns.
            duty.plan, duty.problem = None, str(error)
            wanted = duty.wanted
            self._tell_impossible(duty)
        else:
            duty.impossible_since_s = None
            duty.problem = "" if not duty.failures or duty.shards else duty.problem
        wanted = None if self.statement.is_leaving else wanted
        if duty.is_busy and not self.statement.is_leaving:
            wanted = duty.wanted  # first what was begun; a plan that is still better then will be made again
        # A node that holds nothing disturbs nothing by taking something.
        is_calm = is_covered(view, duty.costs) and not self.statement.is_leaving and duty.wanted is not None
        if not is_calm or self._loop.time() >= duty.replan_at_s:
            # News makes rounds at any moment; a change that was wanted three times within one is not wanted for long.
            duty.replan_at_s = self._loop.time() + _REPLAN_S
            duty.hysteresis = duty.hysteresis.after((wanted,), is_covered=is_calm)
        self._act(duty, view)

    def _tell_impossible(self, duty: ModelDuty) -> None:
        """Once, and not before others had the time to show themselves: after a start every node is alone for a moment."""
        now_s = self._loop.time()
        if duty.impossible_since_s is None:
            duty.impossible_since_s = now_s
        elif now_s - duty.impossible_since_s >= _TELL_IMPOSSIBLE_S:
            duty.impossible_since_s = math.inf
            self._say(
                f"{duty.problem}; add a machine (`potluck invite`), or allow this one more (--memory, --max-layers)"
            )

    def _look_after_workers(self, duty: ModelDuty) -> None:
        """A shard that can serve nobody is given up, and tried anew; if that fails too, others had better hold its layers."""
        for server in [server for server, phase in duty.shards.items() if phase is not ShardPhase.LOADING]:
            if (trouble := trouble_of(server)) is not None:
                del duty.shards[server]
                self._own(self._discard(server, trouble))
                self._failed(duty, str(trouble))
        duty.forget_failures(self._loop.time())

    def _act(self, duty: ModelDuty, view: View) -> None:
        held = [Held(server.settings.stage, phase, server.core.session_count) for server, phase in duty.shards.items()]
        actions = next_actions(
            duty.wanted, held, has_weights=lambda stage: self._known.has_weights(duty.costs.weights_sha256, stage),
            is_served_elsewhere=lambda stage: duty.is_withdrawn or covers(planned_stages(duty, view, self._node.id), stage),
            fetching=duty.fetching,
        )  # fmt: skip
        for action in actions:
            self._carry_out(duty, action, view)

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
        if damage := self._known.damage(weights):  # was told; nothing can be fetched into its folder
            duty.failed(damage, self._loop.time())
            duty.fetching = None
            return
        sources = weight_sources(weights, view)
        self._say(
            f"fetching layers {stage.start}-{stage.stop - 1} of {model} from {len(sources)} peer{'' if len(sources) == 1 else 's'}"
        )
        try:
            report = await WeightFetch(
                self._node.transport, self._store, model_id=model, weights_sha256=weights, stage=stage, sources=sources,
                progress=self._progress(),
            ).run()  # fmt: skip
        except (PotluckError, OSError) as error:
            self._failed(duty, f"the weights of layers {stage.start}-{stage.stop - 1} cannot be had: {error}")
        else:
            stored = await self._known.read(weights, is_changed=True)
            if stored is not None:
                self._node.weights.offer(stored.offered())
            self._say(f"fetched {report.size_bytes / 1e6:.0f} MB in {report.seconds:.1f} s")
        finally:
            duty.fetching = None
            self._wake.set()

    async def _load(self, duty: ModelDuty, stage: Stage) -> None:
        weights = duty.costs.weights_sha256
        server: ShardServer | None = None
        try:
            if not await self._known.is_sound(weights):
                duty.failed(self._known.damage(weights), self._loop.time())
                return
            stored = self._known.stored(weights)
            assert stored is not None
            named = msgspec.structs.replace(stored, id=duty.record.subject)
            server = serve(self._node, named, stage, self._serving_settings(duty, stage))
            duty.shards[server] = ShardPhase.LOADING
            self.on_changed()
            await started(server)
            duty.serves(server, self._loop.time())
            self._say(f"serving {server.shard_id}")
        except (PotluckError, OSError) as error:
            self._failed(duty, str(error))
            if server is not None:
                duty.shards.pop(server, None)
                await self._discard(server, error)
        finally:
            duty.is_loading = False
            self._wake.set()
            self.on_changed()

    def _serving_settings(self, duty: ModelDuty, stage: Stage) -> ServingSettings:
        """A shard that runs keeps what it was given, with its sessions; the next one gets what the plan says then."""
        budget = kv_budget_bytes(duty.costs, stage, self.statement.budget_bytes)
        return msgspec.structs.replace(self.settings.serving, kv_budget_bytes=budget)

    async def _discard(self, server: ShardServer, trouble: Exception) -> None:
        await self._node.remove_shard(server)
        if isinstance(trouble, OutOfDeviceMemory):
            await self._measure_again()

    async def _measure_again(self) -> None:
        """Somebody else uses the device too: what is left of it goes into the next advert, and into everybody's plans."""
        try:
            facts = await asyncio.to_thread(self.measure_device, self.settings.serving.device)
        except PotluckError as error:
            self._say(f"the device cannot be measured: {error}")
            return
        shards = [each for duty in self.duties.values() for each in duty.shards.items()]
        held_mb = sum(
            server.info().vram_mb for server, phase in shards if phase is ShardPhase.LOADING or server.info().is_loaded
        )  # one that sleeps holds nothing
        self.statement.available_bytes = facts.free_bytes
        self.statement.budget_bytes = facts.budget_bytes(self.settings.memory_budget_bytes, held_mb * 1_000_000)

    def _failed(self, duty: ModelDuty, problem: str) -> None:
        pause_s = duty.failed(problem, self._loop.time())
        self._say(f"{problem}; next try in {pause_s:.0f} s")

    # ------------------------------------------------------------ telling the others

    def _tell(self, now_s: float) -> None:
        if (news := self.statement.news(self._own_advert(), now_s)) is not None:
            self._publish(news)

    def _own_advert(self) -> Advert:
        may_serve = self._roster().may_serve(self._node.id)
        return self.statement.advert(list(self.duties.values()), self._known.held(), may_serve, self._loop.time())

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("the steward failed", exc_info=error)
