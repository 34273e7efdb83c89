"""When a change of plan is followed: after it has been wanted for some rounds in a row, at once where layers have no holder. Pure."""

from typing import Generic, TypeVar

import msgspec

ROUNDS = 3

T = TypeVar("T")


class Hysteresis(msgspec.Struct, Generic[T], frozen=True):
    """What is followed now, and what has been wanted instead for how many rounds. `T` is compared by ==: a node's own stage, or
    `Plan.placement`, but not a whole plan, whose figures change all the time."""

    followed: T | None = None
    wanted: T | None = None
    rounds: int = 0

    def after(self, wanted: T, *, is_covered: bool, rounds: int = ROUNDS) -> "Hysteresis[T]":
        """The state after one more round. `is_covered`: every layer has a live holder; where not, nobody waits.

        The first plan is followed at once: there is nothing that it could disturb.
        """
        if wanted == self.followed:
            return Hysteresis(self.followed)
        count = self.rounds + 1 if wanted == self.wanted else 1
        if self.followed is None or not is_covered or count >= rounds:
            return Hysteresis(wanted)
        return Hysteresis(self.followed, wanted, count)
