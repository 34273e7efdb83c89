"""One model of the swarm, as a node is concerned with it: what the plan wants, what is held, what went wrong. No I/O; time is told."""

from potluck.node.placement import model_costs
from potluck.planner.hysteresis import Hysteresis
from potluck.planner.placement import Plan
from potluck.shard.server import ShardServer
from potluck.swarm.steady_figure import SteadyFigure
from potluck.swarm.upkeep import ShardPhase
from potluck.trust.records import ServedModel
from potluck.weights.manifest import Manifest
from potluck.wire.messages import Stage

_RETRY_S = (2.0, 10.0, 30.0, 60.0)  # after a fetch or load that failed
_UNWELL_AFTER = 2  # such failures in a row
_WELL_AFTER_S = 60.0  # without a failure, while something is served


class ModelDuty:
    """`problem`: why there is no plan, or what went wrong last."""

    def __init__(self, record: ServedModel, manifest: Manifest) -> None:
        self.record, self.costs = record, model_costs(manifest, record)
        self.is_withdrawn = False
        self._manifest = manifest
        self.plan: Plan | None = None
        self.problem = ""
        self.impossible_since_s: float | None = None  # inf: and it was told
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

    def failed(self, problem: str, now_s: float) -> float:
        """Returns the seconds until the next try."""
        pause_s = _RETRY_S[min(self.failures, len(_RETRY_S) - 1)]
        self.failures += 1
        self.problem = problem
        self.retry_at_s = now_s + pause_s
        self.well_at_s = self.retry_at_s + _WELL_AFTER_S
        return pause_s

    def serves(self, server: ShardServer, now_s: float) -> None:
        """It is loaded."""
        self.shards[server] = ShardPhase.SERVING
        self.well_at_s = now_s + _WELL_AFTER_S

    def forget_failures(self, now_s: float) -> None:
        """Where something is served and nothing has failed for long. What is being loaded proves nothing, however long it takes."""
        is_serving = ShardPhase.SERVING in self.shards.values()
        if is_serving and not self.is_busy and now_s >= self.well_at_s:
            self.failures = 0

    def is_unwell(self, now_s: float) -> bool:
        """It failed more than once: until it is tried again others had better plan without this node."""
        return self.failures >= _UNWELL_AFTER and now_s < self.retry_at_s

    def measured_layer_us(self, bytes_per_s: float) -> int:
        """One layer for one token: measured where a shard has run, before that from the machine's reading speed.

        The output counts as the layers that it weighs as much as, as in `node_offers`: whoever holds it would look slow else, and as
        soon as it had moved the next one.
        """
        average_bytes = sum(self.costs.layer_bytes) / self.costs.layer_count
        for server in self.shards:
            info, stage = server.info(), server.settings.stage
            layers = stage.stop - stage.start + (self.costs.output_bytes / average_bytes if stage.has_output else 0.0)
            if info.step_us and stage.stop > stage.start:
                return _coarse(int(info.step_us / layers))
        return _coarse(max(1, int(average_bytes / bytes_per_s * 1e6)))


def _coarse(microseconds: int) -> int:
    """To one significant bit and two more, so that a plan does not follow every tremor."""
    step = 1 << max(0, microseconds.bit_length() - 3)
    return max(1, (microseconds + step // 2) // step * step)
