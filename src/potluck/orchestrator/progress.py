"""When a head looks into silence, and what it makes of the answers: the clock of progress and the rounds of probes. Pure.

Finds who is silent and where it stalls; whether anybody is to blame for that is not decided here.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from potluck.orchestrator.probing import Probing, has_waited_its_turn, looks_alive, progress_of, stalled_hop
from potluck.orchestrator.recovery import HeadStage
from potluck.orchestrator.request import GenerationSettings
from potluck.wire.messages import Probed

_LONGEST_USUAL_STEP_S = 1.0  # whatever a shard says of itself, silence is looked into after six times this
_PATIENCE_WITHOUT_RESULT = 10  # stall timeouts, where shards say that they are being fed
_SIGN_OF_LIFE_S = 60.0  # while nobody is asked anything: shards give up sessions of which they hear nothing for minutes
_SLEPT_S = 2.0  # a timer that comes so late: this process was stopped, or starved


class Finding(NamedTuple):
    """Those that do not answer or whose worker is silent at work; or where nothing moves: one stage, or between two (giver, taker)."""

    silent: tuple[HeadStage, ...] = ()
    stalled: tuple[HeadStage | None, HeadStage] | None = None


class ProgressWatch:
    """`moved_s`: when something last went on, as far as one knows. Asks only after silence that is long for this pipeline."""

    def __init__(self, settings: GenerationSettings, expected_step_s: float) -> None:
        self._settings = settings
        self.moved_s = 0.0
        self._asked_s = 0.0
        self._sign_s = 0.0
        self._usual_step_s = min(max(0.0, expected_step_s), _LONGEST_USUAL_STEP_S)
        self._result_s = 0.0
        self._probing: Probing | None = None
        self._nonce = 0
        self._is_feeding = (
            False  # a prompt is under way, or what a new stage is fed: many positions to a result, or none
        )
        self._furthest = 0  # the sum of all positions that shards have reported meanwhile
        self._batches: dict[bytes, int] = {}  # by session, as its shard has reported them
        self._was_late = False

    def __repr__(self) -> str:
        return f"<ProgressWatch moved at {self.moved_s:.3f}, {'asking' if self._probing is not None else 'quiet'}>"

    # ------------------------------------------------------------ what is known to go on

    def start(self, now_s: float) -> None:
        self._result_s = self.moved_s = self._asked_s = self._sign_s = now_s

    def moved(self, now_s: float) -> None:
        self.moved_s = self._asked_s = now_s

    def formed(self, now_s: float, *, is_feeding: bool) -> None:
        self._is_feeding = is_feeding
        self.moved_s = self._asked_s = now_s

    def forming(self, now_s: float) -> None:
        """Everybody is asked to open or to rewire: answers to older probes mean nothing any more."""
        self._probing = None
        self._furthest = 0
        self._batches.clear()
        self.moved_s = self._asked_s = now_s

    def on_result(self, now_s: float, *, is_feeding: bool = False) -> None:
        self._is_feeding = is_feeding
        self._result_s = self.moved_s = self._asked_s = now_s

    def note_step(self, total_s: float) -> None:
        usual, last_s = self._usual_step_s, min(total_s, _LONGEST_USUAL_STEP_S)
        self._usual_step_s = last_s if usual == 0 else 0.8 * usual + 0.2 * last_s

    # ------------------------------------------------------------ the clock

    def wake_s(self) -> float:
        """When to look, at the latest: for answers that are due, or at what is silent."""
        if self._probing is not None:
            return self._probing.started_s + self._settings.probe_patience_s
        return self._asked_s + max(self._settings.probe_after_s, 6.0 * self._usual_step_s)

    @property
    def is_probing(self) -> bool:
        return self._probing is not None

    def is_time_up(self, now_s: float) -> bool:
        """Whether those who have not answered by now are gone."""
        return self._probing is not None and now_s - self._probing.started_s >= self._settings.probe_patience_s

    def is_silence_long(self, now_s: float) -> bool:
        return now_s - self._asked_s >= max(self._settings.probe_after_s, 6.0 * self._usual_step_s)

    def has_slept(self, late_s: float) -> bool:
        """Whether this process did not run, going by how late a timer comes. Only believed once in a row."""
        was_late, self._was_late = self._was_late, late_s > _SLEPT_S
        return self._was_late and not was_late

    def slept(self, late_s: float, now_s: float) -> None:
        """That nobody was heard meanwhile says nothing about them."""
        self._result_s += late_s
        self.moved(now_s)

    # ------------------------------------------------------------ asking

    def ask(self, now_s: float) -> int:
        """Begins a round: the number that every stage is to be asked with."""
        self._nonce += 1
        self._probing = Probing(now_s, self._nonce)
        return self._nonce

    def takes_sign_of_life(self, now_s: float) -> bool:
        """Whether it is time for one, which is the last then."""
        is_due = now_s - self._sign_s >= _SIGN_OF_LIFE_S
        if is_due:
            self._sign_s = now_s
        return is_due

    def drop_questions(self) -> None:
        self._probing = None

    def answered(self, session: bytes, message: Probed, stages: int) -> bool:
        """Whether all of so many stages have answered now."""
        probing = self._probing
        if probing is None or message.nonce != probing.nonce:
            return False
        probing.answers[session] = message
        return len(probing.answers) == stages

    def judge(
        self, stages: Sequence[HeadStage], awaited: Collection[bytes], sent: int, length: int, now_s: float
    ) -> Finding | None:
        """Ends the round. `awaited`: sessions that have yet to open or to rewire; of a journal of `length`, `sent` are out."""
        assert self._probing is not None
        answers, self._probing = self._probing.answers, None
        self._asked_s = now_s
        silent = tuple(stage for stage in stages if not self._looks_alive(stage, answers.get(stage.session), awaited))
        if silent:
            return Finding(silent)
        if self._is_feeding and self._has_moved(answers, length, now_s):
            self.moved_s = now_s
        elif now_s - self.moved_s >= self._settings.stall_timeout_s:
            return Finding(stalled=_located(stages, awaited, answers, sent))
        return None

    def _looks_alive(self, stage: HeadStage, answer: Probed | None, awaited: Collection[bytes]) -> bool:
        # Perhaps loading: it knows nothing yet, and may be slow.
        is_opening = stage.session in awaited and stage.is_new
        return looks_alive(answer, self._settings.worker_patience_s, is_opening=is_opening)

    def _has_moved(self, answers: dict[bytes, Probed], length: int, now_s: float) -> bool:
        """Whether shards work through what they are fed, or other sessions' prompts before it. Not believed for ever."""
        total = progress_of(answers, length)
        has_moved = total > self._furthest or has_waited_its_turn(answers, self._batches)
        self._furthest = max(self._furthest, total)
        self._batches = {session: answer.batches for session, answer in answers.items()}
        return has_moved and now_s - self._result_s < _PATIENCE_WITHOUT_RESULT * self._settings.stall_timeout_s


def _located(
    stages: Sequence[HeadStage], awaited: Collection[bytes], answers: dict[bytes, Probed], sent: int
) -> tuple[HeadStage | None, HeadStage]:
    """Where nothing moves any more. While an epoch is being formed: the first that has not answered."""
    unanswered = next((stage for stage in stages if stage.session in awaited), None)
    return stalled_hop(stages, answers, sent) if unanswered is None else (None, unanswered)
