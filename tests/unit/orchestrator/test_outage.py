"""What the reader is told of an outage, and how long a holder is waited for."""

from potluck.orchestrator.outage import Outage, Troubles
from potluck.orchestrator.request import GenerationSettings

SETTINGS = GenerationSettings(holder_wait_s=5.0, holder_retry_s=0.5, fallback_after=1)


def test_losses_until_the_next_token_are_one_outage_since_the_last_progress() -> None:
    troubles = Troubles(SETTINGS)
    assert troubles.over() is None
    troubles.lost(["a"], 3.0)
    troubles.lost(["b"], 4.0)
    assert troubles.current is not None
    troubles.current.fed(7, is_from_tokens=False)
    assert troubles.over() == Outage(3.0, ["a", "b"], 7, "replay")
    assert troubles.over() is None


def test_feeding_from_tokens_is_a_prefill_unless_there_is_nothing_to_feed() -> None:
    outage = Outage(0.0)
    outage.fed(0, is_from_tokens=True)
    assert outage.method == "replay"
    outage.fed(5, is_from_tokens=True)
    assert (outage.method, outage.replayed) == ("re-prefill", 5)


def test_ones_own_layers_come_first_after_several_losses_without_a_token() -> None:
    troubles = Troubles(SETTINGS)
    troubles.lost(["a"], 0.0)
    assert not troubles.prefers_local
    troubles.lost(["b"], 0.0)
    assert troubles.prefers_local
    troubles.over()
    assert not troubles.prefers_local


def test_a_holder_is_waited_for_from_the_first_time_on_and_sleep_does_not_count() -> None:
    troubles = Troubles(SETTINGS)
    troubles.wait(10.0)
    assert troubles.next_try_s() == 10.5
    assert not troubles.is_retry_due(10.4)
    troubles.wait(14.9)
    assert troubles.next_try_s() == 15.0
    assert troubles.is_hopeless(15.0)
    troubles.slept(2.0)
    assert not troubles.is_hopeless(16.9)
    troubles.over()
    troubles.wait(20.0)
    assert not troubles.is_hopeless(24.9)
