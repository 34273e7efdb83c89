"""Bodies of requests into typed data, with complaints that name the field. Knows no surface; all limits are checked before use."""

import re
import secrets
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from potluck.core.errors import BadRequest, UnsupportedParameter
from potluck.core.sampling_params import SamplingParams
from potluck.gateway.request import Json

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_MAX_TOKENS = 1 << 24
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_MISSING = re.compile(r"^Object missing required field `(\w+)`$")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
T = TypeVar("T", bound=msgspec.Struct)


def read_body(data: bytes, kind: type[T]) -> tuple[T, Json]:
    """The body as `kind`, and as it came. A null is the same as a field that is not there."""
    try:
        raw = msgspec.json.decode(data)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {_explained(data, error)}") from None
    if not isinstance(raw, dict):
        raise BadRequest("the body must be a JSON object")
    raw = {key: value for key, value in raw.items() if value is not None}
    return converted(raw, kind), raw


def converted(raw: Json, kind: type[T]) -> T:
    """Raises BadRequest with the field that is wrong."""
    try:
        return msgspec.convert(raw, kind)
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        message = str(error)
        if missing := _MISSING.search(message):
            raise BadRequest(f"{missing.group(1)} is missing", missing.group(1)) from None
        place = _PLACE.search(message)
        param = place.group(1) if place is not None else None
        raise BadRequest(f"{param or 'the body'}: {_PLACE.sub('', message)}", param) from None


def _explained(data: bytes, error: Exception) -> str:
    """What the decoder says, but where that misleads: half a surrogate pair near the end is to it a body that was cut off."""
    if not data:
        return "it is empty"
    if data.rstrip().endswith(b"}") and _SURROGATE.search(data) and "truncated" in str(error):
        return r"half of a character that \u escapes write in two (a lone surrogate)"
    return str(error)


def refuse(raw: Json, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Raises UnsupportedParameter for a field that would change the output; `neutral` has the values that would not."""
    for name, values in neutral.items():
        if name in raw and not any(type(raw[name]) is type(value) and raw[name] == value for value in values):
            raise UnsupportedParameter(f"{name} cannot be honoured here", name)


class _SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


def sampling_params(
    raw: Json, *, temperature: float, logprobs: int | None = None, defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """From fields that all surfaces name alike. Raises BadRequest with everything that is out of range.

    Without a seed every request has one of its own, as clients expect where they ask for random text.
    """
    # Surfaces name in their bodies what their own clients send; the other fields count just as much where they come.
    given = msgspec.structs.asdict(converted(raw, _SamplingFields))
    named = {name: value for name, value in given.items() if value is not None}
    values: dict[str, Any] = {"temperature": temperature, **(defaults or {}), **named}
    values["top_k"] = max(0, values.get("top_k", 0))  # -1 is how some clients say "off"
    if values.get("top_p") == 0:
        values["top_p"] = sys.float_info.min  # the least that is anything: the likeliest token alone
    values["logit_bias"] = _logit_bias(values.get("logit_bias", {}))
    values["seed"] = secrets.randbits(64) if "seed" not in named else named["seed"] & ((1 << 64) - 1)
    return SamplingParams(**values, logprobs=logprobs).check()


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in given):
        raise BadRequest("logit_bias must map token ids to numbers from -100 to 100", "logit_bias")
    return {int(key): bias for key, bias in given.items()}


def stop_strings(given: str | Iterable[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def checked_limit(max_tokens: int | None, name: str) -> int | None:
    if max_tokens is not None and not 1 <= max_tokens <= MAX_MAX_TOKENS:
        raise BadRequest(f"{name} must be from 1 to {MAX_MAX_TOKENS}, not {max_tokens}", name)
    return max_tokens


def checked_count(n: int, most: int, name: str) -> int:
    if not 1 <= n <= most:
        raise BadRequest(f"{name} must be from 1 to {most}, not {n}", name)
    return n
