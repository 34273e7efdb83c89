"""How tokens are chosen: every parameter that a request may set, checked once, all complaints together. Pure data."""

from typing import Annotated

import msgspec

from potluck.core.errors import BadRequest

MAX_LOGIT_BIAS = 4096
MAX_TOP_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Neutral by default except for `temperature`; 0 means greedy. `seed` is 64 bits; top_k 0 and top_p 1 switch a filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # msgspec copies the default, and checks the length of what it decodes before it builds anything.
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=MAX_LOGIT_BIAS)] = {}
    seed: int = 0
    logprobs: int | None = None  # None: not wanted; otherwise how many alternatives beside the chosen one

    def check(self) -> "SamplingParams":
        """Itself, or BadRequest with everything that is out of range."""
        problems = [(name, text) for name, is_wrong, text in self._complaints() if is_wrong]
        if problems:
            raise BadRequest("; ".join(f"{name} {text}" for name, text in problems), problems[0][0])
        return self

    def _complaints(self) -> list[tuple[str, bool, str]]:
        # Written as `not low <= x <= high`, which is also true of what is not a number.
        return [
            ("temperature", not 0.0 <= self.temperature <= 100.0, f"must be from 0 to 100, not {self.temperature}"),
            ("top_k", not 0 <= self.top_k <= 1 << 20, f"must be 0 (off) or a count up to {1 << 20}, not {self.top_k}"),
            ("top_p", not 0.0 < self.top_p <= 1.0, f"must be above 0 and at most 1, not {self.top_p}"),
            ("min_p", not 0.0 <= self.min_p <= 1.0, f"must be from 0 to 1, not {self.min_p}"),
            (
                "repetition_penalty",
                not 0.0 < self.repetition_penalty <= 100.0,
                f"must be above 0 and at most 100, not {self.repetition_penalty}",
            ),
            (
                "presence_penalty",
                not -2.0 <= self.presence_penalty <= 2.0,
                f"must be from -2 to 2, not {self.presence_penalty}",
            ),
            (
                "frequency_penalty",
                not -2.0 <= self.frequency_penalty <= 2.0,
                f"must be from -2 to 2, not {self.frequency_penalty}",
            ),
            ("logit_bias", len(self.logit_bias) > MAX_LOGIT_BIAS, f"may name at most {MAX_LOGIT_BIAS} tokens"),
            (
                "logit_bias",
                not all(token >= 0 and -100.0 <= bias <= 100.0 for token, bias in self.logit_bias.items()),
                "must map token ids to numbers from -100 to 100",
            ),
            ("seed", not 0 <= self.seed < 1 << 64, f"must be from 0 to 2**64 - 1, not {self.seed}"),
            (
                "top_logprobs",
                self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
                f"must be from 0 to {MAX_TOP_LOGPROBS}, not {self.logprobs}",
            ),
        ]
