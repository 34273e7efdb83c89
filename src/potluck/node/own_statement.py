"""What a node tells the swarm about itself, and when that is worth telling anew. No I/O; time is told."""

from collections.abc import Callable, Sequence

import msgspec

from potluck import __version__
from potluck.core.device_facts import DeviceFacts
from potluck.core.layers import LayerRange
from potluck.core.limits import ARITHMETIC_VERSION
from potluck.node.duty import ModelDuty
from potluck.node.serving import ServingSettings
from potluck.swarm.adverts import (
    ADVERT_LIFETIME_S,
    MAX_HELD,
    MAX_SHARDS,
    MAX_SPEEDS,
    MAX_UNWELL,
    Advert,
    HeldWeights,
    LayerSpeed,
    LinkFigures,
)
from potluck.swarm.steady_figure import SteadyFigure
from potluck.swarm.upkeep import ShardPhase
from potluck.wire.messages import ShardInfo

_LOAD_NEWS_S = 5.0  # between adverts that differ in nothing but how busy the shards are


class StewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine gives. `bytes_per_s`: how fast it reads weights, measured at the start."""

    name: str = ""
    is_serving: bool = True
    memory_total_bytes: int
    memory_budget_bytes: int
    bytes_per_s: float
    lifetime_s: int = ADVERT_LIFETIME_S
    pinned: LayerRange | None = None
    max_layers: int = 0
    serving: ServingSettings = ServingSettings()
    device: DeviceFacts | None = None  # None: the CPU


class OwnStatement:
    """`link_figures`: round trips as measured now."""

    def __init__(
        self, node: bytes, settings: StewardSettings, link_figures: Callable[[], tuple[LinkFigures, ...]]
    ) -> None:
        self.addresses: tuple[str, ...] = ()
        self.is_leaving = False
        self.budget_bytes = settings.memory_budget_bytes
        self.available_bytes = settings.memory_budget_bytes if settings.device is None else settings.device.free_bytes
        self._node, self._settings, self._link_figures = node, settings, link_figures
        self._rtts_us: dict[bytes, SteadyFigure] = {}
        self._told: Advert | None = None
        self._told_s = 0.0

    def __repr__(self) -> str:
        return f"<OwnStatement at {', '.join(self.addresses)}{', leaving' if self.is_leaving else ''}>"

    def news(self, advert: Advert, now_s: float) -> Advert | None:
        """The advert where it is to be told now: another load alone is told now and then only."""
        is_same = self._told is not None and _without_load(advert) == _without_load(self._told)
        if advert == self._told or (is_same and now_s - self._told_s < _LOAD_NEWS_S):
            return None
        self._told, self._told_s = advert, now_s
        return advert

    def advert(self, duties: Sequence[ModelDuty], held: Sequence[HeldWeights], may_serve: bool, now_s: float) -> Advert:
        settings, duties = self._settings, duties[:MAX_SPEEDS]
        unwell = [duty.costs.weights_sha256 for duty in duties if duty.is_unwell(now_s)]
        return Advert(
            node=self._node, lifetime_s=settings.lifetime_s, name=settings.name, software=__version__,
            arithmetic=ARITHMETIC_VERSION, addresses=self.addresses, shards=tuple(_offered_shards(duties)[:MAX_SHARDS]),
            held=tuple(held[:MAX_HELD]), memory_total_bytes=settings.memory_total_bytes,
            memory_available_bytes=self.available_bytes, memory_budget_bytes=max(0, self.budget_bytes - _lingering_bytes(duties)),
            device=settings.serving.device, device_name="" if settings.device is None else settings.device.name,
            speeds=tuple(LayerSpeed(duty.costs.weights_sha256, self._layer_us(duty, now_s)) for duty in duties),
            threads=settings.serving.threads, links=self._steady_links(now_s), is_draining=self.is_leaving,
            allows_serving=settings.is_serving and may_serve,
            pinned=(settings.pinned.start, settings.pinned.stop) if settings.pinned is not None else None,
            max_layers=settings.max_layers, intended=tuple(_intended(duties)), unwell=tuple(unwell[:MAX_UNWELL]),
        )  # fmt: skip

    def _layer_us(self, duty: ModelDuty, now_s: float) -> int:
        return duty.layer_us.after(duty.measured_layer_us(self._settings.bytes_per_s), now_s)

    def _steady_links(self, now_s: float) -> tuple[LinkFigures, ...]:
        measured = self._link_figures()
        self._rtts_us = {each.node: self._rtts_us.get(each.node) or SteadyFigure() for each in measured}
        return tuple(
            msgspec.structs.replace(each, rtt_us=self._rtts_us[each.node].after(each.rtt_us, now_s))
            for each in sorted(measured, key=lambda each: each.node)
        )


def _offered_shards(duties: Sequence[ModelDuty]) -> list[ShardInfo]:
    return [server.info() for duty in duties for server, phase in duty.shards.items() if phase is ShardPhase.SERVING]


def _lingering_bytes(duties: Sequence[ModelDuty]) -> int:
    """What is held of models that the swarm serves no more, until the sessions on it have ended: no plan counts it."""
    withdrawn = [duty for duty in duties if duty.is_withdrawn]
    return sum(duty.costs.need_bytes(server.settings.stage) for duty in withdrawn for server in duty.shards)


def _intended(duties: Sequence[ModelDuty]) -> list[HeldWeights]:
    return [
        HeldWeights(duty.costs.weights_sha256, ((duty.wanted.start, duty.wanted.stop),))
        for duty in duties
        if duty.is_busy and duty.wanted is not None
    ]


def _without_load(advert: Advert) -> Advert:
    quiet = tuple(msgspec.structs.replace(shard, streams=0, queue_depth=0, step_us=0) for shard in advert.shards)
    return msgspec.structs.replace(advert, shards=quiet)
