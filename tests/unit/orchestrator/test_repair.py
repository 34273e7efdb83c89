"""What is done about a failing stage, decided without a generation around it."""

import itertools
from collections import Counter
from collections.abc import Sequence

from potluck.core.sampling_params import SamplingParams
from potluck.orchestrator.journal import Journal
from potluck.orchestrator.pipeline import Pipeline
from potluck.orchestrator.recovery import HeadStage
from potluck.orchestrator.repair import NOTHING, Deed, Repair
from potluck.orchestrator.request import GenerationRequest, GenerationSettings
from potluck.planner.cover import Placed
from potluck.wire.messages import Close, Fault, Open, Opened, Refused, Rewire, Rewired, ShardLost, Stage

SETTINGS = GenerationSettings(holder_wait_s=5.0, holder_retry_s=0.5, fallback_after=1)
REQUEST = GenerationRequest(
    model="m", weights_sha256="a" * 64, arithmetic=1, layer_count=3, prompt=(1, 2, 3), max_tokens=4,
    params=SamplingParams(), eos=(),
)  # fmt: skip


def placed(number: int, layer: int) -> Placed:
    return Placed(bytes([number]) * 32, f"node:{number}", Stage(layer, layer + 1, layer == 0, layer == 2))


class Shop:
    """Three stages on nodes 1 to 3; `spares` by layer, taken unless excluded."""

    def __init__(self, **spares: int) -> None:
        ids = itertools.count(1)
        self.counters: Counter[str] = Counter()
        stages = [placed(1, 0), placed(2, 1), placed(3, 2)]
        self.pipeline = Pipeline(REQUEST, SETTINGS, stages, lambda: next(ids).to_bytes(16, "big"), self.counters)
        self.repair = Repair(REQUEST, SETTINGS, self.pipeline, self.repick, self.counters)
        self.spares = {int(layer[1:]): number for layer, number in spares.items()}
        self.asked: list[tuple[frozenset[bytes], bool]] = []

    def repick(
        self, kept: Sequence[Placed | None], excluded: frozenset[bytes], allows_local: bool
    ) -> list[list[Placed]] | None:
        self.asked.append((excluded, allows_local))
        groups = []
        for layer, stage in enumerate(kept):
            spare = placed(self.spares.get(layer, 0), layer)
            if stage is None and (layer not in self.spares or spare.node in excluded):
                return None
            groups.append([stage or spare])
        return groups


def test_a_lost_stage_is_told_closed_and_replaced() -> None:
    shop = Shop(n1=9)
    lost = shop.pipeline.stages[1]
    decision = shop.repair.lose([lost], "reset", 1.0, 2.0)
    assert decision.deed is Deed.FORM
    assert [(effect.node[0], type(effect.message)) for effect in decision.effects] == [
        (2, Close), (1, ShardLost), (3, ShardLost),
    ]  # fmt: skip
    assert [frame.shard_id for frame in decision.frames] == [lost.name]
    assert [each.node[0] for each in shop.pipeline.placed] == [1, 9, 3]
    assert shop.repair.lose([lost], "again", 1.0, 2.0) is NOTHING


def test_a_refusal_is_no_news_for_the_others() -> None:
    shop = Shop(n1=9)
    stage = shop.pipeline.stages[1]
    decision = shop.repair.on_refused(stage, Refused(stage.session, 0, "shard_unavailable", "full"), 1.0, 2.0)
    assert [type(effect.message) for effect in decision.effects] == [Close]
    assert shop.repair.on_refused(stage, Refused(stage.session, 7, "shard_unavailable", ""), 1.0, 2.0) is NOTHING


def test_without_a_holder_one_waits_asks_again_and_gives_up_with_the_last_reason() -> None:
    shop = Shop()
    stage = shop.pipeline.stages[1]
    decision = shop.repair.on_refused(stage, Refused(stage.session, 0, "kv_budget_exceeded", "full"), 1.0, 2.0)
    assert decision.deed is Deed.WAIT
    assert [allows_local for _, allows_local in shop.asked] == [False, True]
    assert shop.repair.keep_waiting(2.4) is NOTHING
    assert shop.repair.keep_waiting(2.5).deed is Deed.WAIT
    assert shop.asked[-1][0] == frozenset()  # whoever failed may be well again
    given_up = shop.repair.keep_waiting(7.0)
    assert (given_up.deed, given_up.reason) == (Deed.ABORT, ("kv_budget_exceeded", "full"))


def test_a_liar_is_not_asked_again_even_where_nobody_else_is_left() -> None:
    shop = Shop(n2=3)
    last = shop.pipeline.stages[2]
    assert shop.repair.on_rubbish(last, "rubbish", 1.0, 2.0).deed is Deed.WAIT
    assert shop.repair.keep_waiting(3.0).deed is Deed.WAIT
    assert shop.asked[-1][0] == {last.placed.node}
    assert shop.counters["shard_corruption"] == 1


def replaying(shop: Shop) -> HeadStage:
    """The first stage, in an epoch in which it has to feed the second what it had sent before."""
    first, _, last = shop.pipeline.stages
    first.is_empty = last.is_empty = False
    shop.pipeline.form(3, Journal(REQUEST).sampler())
    assert shop.pipeline.settle() is not None
    return first


def test_a_dropped_outbox_empties_what_follows_and_loses_nobody() -> None:
    shop = Shop()
    first = replaying(shop)
    fault = Fault(first.session, 0, "outbox_dropped", "gone", first.placed.node)
    assert shop.repair.on_fault(first, fault, 1.0, 2.0, is_running=False) is NOTHING
    assert shop.repair.on_fault(first, fault, 1.0, 2.0, is_running=True).deed is Deed.FORM
    assert [stage.is_empty for stage in shop.pipeline.stages] == [False, True, False]
    assert shop.repair.troubles.current is None


def test_who_was_not_asked_for_its_outbox_cannot_start_an_epoch_by_saying_that_it_is_gone() -> None:
    shop = Shop()
    replaying(shop)
    first, second, last = shop.pipeline.stages
    for stage in (second, last):
        fault = Fault(stage.session, 0, "outbox_dropped", "gone", stage.placed.node)
        assert shop.repair.on_fault(stage, fault, 1.0, 2.0, is_running=True) is NOTHING
        assert stage.has_outbox
    assert shop.counters["unexpected_message"] == 2
    assert not any(stage.is_lost or stage.is_empty for stage in (first, second, last))


def test_who_says_twice_without_a_token_in_between_that_its_outbox_is_gone_is_lost() -> None:
    shop = Shop(n0=9)
    first = replaying(shop)
    fault = Fault(first.session, 0, "outbox_dropped", "gone", first.placed.node)
    for _ in range(3):  # tokens come in between: it was unlucky
        assert shop.repair.on_fault(first, fault, 1.0, 2.0, is_running=True).deed is Deed.FORM
        assert not first.is_lost
        shop.repair.troubles.over()
    assert shop.repair.on_fault(first, fault, 1.0, 2.0, is_running=True).deed is Deed.FORM
    decision = shop.repair.on_fault(first, fault, 1.0, 2.0, is_running=True)
    assert decision.deed is Deed.FORM
    assert [frame.code for frame in decision.frames] == ["outbox_dropped"]
    assert [each.node[0] for each in shop.pipeline.placed] == [9, 2, 3]


def test_an_epoch_is_formed_answered_and_settled() -> None:
    shop, sampler = Shop(n1=9), Journal(REQUEST).sampler()
    pipeline = shop.pipeline
    opens = [effect.message for effect in pipeline.form(0, sampler)]
    assert [isinstance(message, Open) and message.sampler is not None for message in opens] == [False, False, True]
    for stage in pipeline.stages:
        assert pipeline.take_answer(stage, Opened(stage.session, 0), 0)
    assert not pipeline.awaited
    assert pipeline.settle() == []
    shop.repair.lose([pipeline.stages[1]], "reset", 1.0, 2.0)
    pipeline.epoch = 1
    assert [type(effect.message) for effect in pipeline.form(3, sampler)] == [Rewire, Open, Rewire]
    first, new, last = pipeline.stages
    assert pipeline.take_answer(first, Rewired(first.session, 1, 3, 0), 3)
    assert pipeline.take_answer(new, Opened(new.session, 1), 3)
    assert not pipeline.take_answer(last, Rewired(last.session, 1, 2, 0), 3)  # it has less than it should
    assert last.is_empty
    assert pipeline.awaited == {last.session}
