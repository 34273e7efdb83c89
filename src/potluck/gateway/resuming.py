"""Answers that are taken up where they broke off: what an event's id says, which events a client has had, and what may be made again.

A stream is a pure function of its tokens, and those of the request and of what the handle says. So a client that sends the same body
again, to any member, with the id of the last event that it got, gets the events after that one. Knows no HTTP.
"""

import base64
import copy
import hashlib
import re
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

from potluck.core.errors import BadRequest, ResumeImpossible
from potluck.core.remembered import SECRET_BYTES, Accounts, AnswerSoFar, resume_key
from potluck.gateway.answering import Answer, OpenModel
from potluck.gateway.choice import ChoiceStream
from potluck.gateway.preparing import Prepared, PreparedChoice
from potluck.gateway.reading import MAX_MAX_TOKENS
from potluck.gateway.request import InferenceRequest
from potluck.gateway.surface import NAME_BYTES, Surface
from potluck.orchestrator.frames import TokenDelta
from potluck.orchestrator.request import GenerationRequest
from potluck.text.tokenizer import Tokenizer
from potluck.wire.messages import Boundary

LAST_EVENT_ID = "last-event-id"
_VERSION = 2
_WEIGHTS_BYTES, _DIGEST_BYTES = 8, 8
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]{1,1200})\.([0-9]{1,9})", re.ASCII)
_MOST_BEFORE_TOKENS = 2  # events: the role, and the prompt where it is echoed
_CALL_ID_ALPHABET = string.ascii_letters + string.digits


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an answer depends on beside the request's body, and the secret by which shards remember it.

    `request`: of the body's digest, so that nobody gets the end of one answer after the beginning of another.
    `arithmetic`: the one that all its tokens were computed by, where anybody who computes by it gets the same; 0: there is none.
    """

    version: Annotated[int, Meta(ge=_VERSION, le=_VERSION)]
    name: Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    created: Annotated[int, Meta(ge=0, lt=1 << 62)]
    weights: Annotated[bytes, Meta(min_length=_WEIGHTS_BYTES, max_length=_WEIGHTS_BYTES)]
    seed: Annotated[bytes, Meta(min_length=8, max_length=8)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_MAX_TOKENS)]
    request: Annotated[bytes, Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]
    arithmetic: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    boundaries: Annotated[tuple[Boundary, ...], Meta(max_length=64)] = ()

    def text(self) -> str:
        return base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).rstrip(b"=").decode()


class EventId(NamedTuple):
    """The last of `events` that a client has had of an answer."""

    handle: Handle
    events: int


def read_event_id(text: str) -> EventId:
    """Raises BadRequest for what none of us has made."""
    found = _EVENT_ID.fullmatch(text)
    if found is None:
        raise BadRequest("Last-Event-ID is not the id of an event of ours", LAST_EVENT_ID)
    shown, events = found.groups()
    try:
        handle = msgspec.msgpack.decode(base64.urlsafe_b64decode(shown + "=" * (-len(shown) % 4)), type=Handle)
    except (ValueError, msgspec.DecodeError):
        raise BadRequest("Last-Event-ID is damaged, or of another version", LAST_EVENT_ID) from None
    return EventId(handle, int(events))


@runtime_checkable
class ResumableSurface(Surface, Protocol):
    """One whose stream can be taken up again: server-sent events, each a function of those before and its own."""

    created: int

    @property
    def name(self) -> bytes:
        """The part of the response's id that is its own."""

    def answer_as(self, name: bytes, created: int) -> None:
        """As the answer that was begun elsewhere."""


class EventNumbers:
    """Puts an id before each event, and holds back those that the client has had."""

    def __init__(self, handle: Handle, had: int = 0) -> None:
        self.handle, self._had, self._count = handle, had, 0
        self._line = b"id: %s." % handle.text().encode()

    def __repr__(self) -> str:
        return f"<EventNumbers {self._count}, {self._had} had before>"

    @property
    def is_silent(self) -> bool:
        return self._count < self._had

    @property
    def last_id(self) -> str:
        return f"{self.handle.text()}.{max(self._count, self._had)}"

    def cannot_be_made_again(self) -> None:
        """From here on the tokens depend on who computed them."""
        self.handle = msgspec.structs.replace(self.handle, arithmetic=0)
        self._line = b"id: %s." % self.handle.text().encode()

    def number(self, events: bytes) -> bytes:
        """`events`: none or several, each of which ends with an empty line."""
        shown = b""
        for event in events.split(b"\n\n")[:-1]:
            self._count += 1
            if self._count > self._had:
                shown += b"%s%d\n%s\n\n" % (self._line, self._count, event)
        return shown

    def check_all_made(self) -> None:
        """At the end. Raises ResumeImpossible where the client claims to have had more than there is."""
        if self.is_silent:
            raise ResumeImpossible(
                f"the whole answer has {self._count} events, fewer than the {self._had} that Last-Event-ID names"
            )


class ResumableAnswer:
    """One streamed answer of one choice: from its beginning, or (`resumed`) from where a client has lost it."""

    def __init__(self, surface: ResumableSurface, resumed: EventId | None) -> None:
        self._surface, self._resumed = surface, resumed
        if resumed is not None:
            surface.answer_as(resumed.handle.name, resumed.handle.created)
        # A new one each time: an earlier head that is still at work must not be taken for this one.
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._request: GenerationRequest | None = None
        self._digest = b""
        self._arithmetic = 0

    @property
    def events_had(self) -> int:
        return 0 if self._resumed is None else self._resumed.events

    async def settle(self, model: OpenModel, prepared: Prepared) -> Prepared:
        """What is to be generated. Raises ResumeImpossible where that cannot become what the client has had."""
        [choice] = prepared.choices
        choice = msgspec.structs.replace(choice, new_call_id=call_ids(self._surface.name))
        self._digest = prepared.digest[:_DIGEST_BYTES]
        if self._resumed is not None:
            if self._resumed.handle.request != self._digest:
                raise ResumeImpossible(
                    "this is not the request that the answer was begun for: send the same body again"
                )
            choice = await _taken_up(choice, model, self._resumed)
            known = self._resumed.handle.arithmetic
            self._arithmetic = known if model.arithmetic_of(choice.request) == known else 0
        request = msgspec.structs.replace(choice.request, resume_key=resume_key(self._secret))
        self._request = request
        return prepared._replace(choices=(msgspec.structs.replace(choice, request=request),))

    def numbers(self, answer: Answer | None) -> EventNumbers:
        """`answer`: as it has begun; of one that was resumed all is known before."""
        request = self._request
        assert request is not None
        arithmetic, boundaries = self._arithmetic, request.boundaries
        if self._resumed is None and answer is not None:
            arithmetic, boundaries = answer.arithmetic, answer.boundaries
        handle = Handle(
            _VERSION, self._surface.name, self._secret, self._surface.created, bytes.fromhex(request.weights_sha256)[:_WEIGHTS_BYTES],
            request.params.seed.to_bytes(8, "little"), request.max_tokens, self._digest, arithmetic, boundaries,
        )  # fmt: skip
        return EventNumbers(handle, self.events_had)


def resumable(request: InferenceRequest, surface: Surface, last_event_id: str | None) -> ResumableAnswer | None:
    """None: an answer that cannot be resumed. Raises BadRequest where the client wants just that."""
    if isinstance(surface, ResumableSurface) and surface.is_streaming and request.choice_count == 1:
        return ResumableAnswer(surface, None if last_event_id is None else read_event_id(last_event_id))
    if last_event_id is None:
        return None
    raise BadRequest(
        "only streams of /v1/chat/completions and /v1/completions with one choice can be resumed", LAST_EVENT_ID
    )


def _check_boundaries(boundaries: tuple[Boundary, ...], layer_count: int) -> None:
    """A shard that is told of impossible ones would be blamed for what it makes of them."""
    layers = [boundary.layer for boundary in boundaries]
    if layers != sorted(set(layers)) or any(layer > layer_count for layer in layers):
        raise BadRequest("Last-Event-ID is damaged", LAST_EVENT_ID)


async def _taken_up(choice: PreparedChoice, model: OpenModel, resumed: EventId) -> PreparedChoice:
    handle = resumed.handle
    if bytes.fromhex(model.card.weights_sha256)[:_WEIGHTS_BYTES] != handle.weights:
        raise ResumeImpossible("the answer was begun with other weights than those that are on offer now")
    _check_boundaries(handle.boundaries, model.facts.layer_count)
    room = model.facts.context_length - len(choice.request.prompt)
    if handle.max_tokens > room:
        raise ResumeImpossible("this is not the request that the answer was begun for: it leaves less room")
    seed = int.from_bytes(handle.seed, "little")
    request = msgspec.structs.replace(
        choice.request, params=msgspec.structs.replace(choice.request.params, seed=seed), max_tokens=handle.max_tokens,
        boundaries=handle.boundaries, has_fixed_boundaries=True,
    )  # fmt: skip
    choice = msgspec.structs.replace(choice, request=request)
    accounts = await model.recall(handle.secret, len(request.prompt) + request.max_tokens)
    account = _account(choice, accounts, model.tokenizer, resumed.events)
    if account is not None:
        return _from_memory(choice, account, model.tokenizer, resumed.events)
    if resumed.events and (handle.arithmetic == 0 or model.arithmetic_of(request) != handle.arithmetic):
        raise ResumeImpossible(
            "no machine remembers this answer any more, or those that do contradict each other, "
            "and those that would make it again need not get the same"
        )
    return msgspec.structs.replace(choice, must_be_bitwise=True)


def _account(choice: PreparedChoice, accounts: Accounts, tokenizer: Tokenizer, events: int) -> AnswerSoFar | None:
    """The one to go on from; None: there is none, or it is not clear who is right.

    Others may lie. So this node's own memory goes first, and of what they say no more is believed than the client has had.
    """
    own = accounts.own if accounts.own is not None and _fits(accounts.own, choice.request) else None
    told = [each for each in accounts.told if _fits(each, choice.request)]
    if own is not None:
        if len(own.chosen) >= _count_had(choice, own.chosen, tokenizer, events):
            return own
        told = [own, *(each for each in told if _is_one_answer([own, each]))]
    if not told or not _is_one_answer(told):
        return None
    told.sort(key=_length)
    had = _count_had(choice, told[-1].chosen, tokenizer, events)
    return next((each for each in told if len(each.chosen) >= had), told[-1])


def _fits(account: AnswerSoFar, request: GenerationRequest) -> bool:
    return (
        len(account.chosen) <= request.max_tokens
        and account.prompt == request.prompt
        and all(0 <= token < request.vocabulary_size for token in account.chosen)
    )


def _length(account: AnswerSoFar) -> int:
    return len(account.tokens)


def _is_one_answer(accounts: Sequence[AnswerSoFar]) -> bool:
    """Whether all of them are the beginning of the longest."""
    longest = max(accounts, key=_length)
    return all(each.tokens == longest.tokens[: _length(each)] for each in accounts)


def _count_had(choice: PreparedChoice, tokens: Sequence[int], tokenizer: Tokenizer, events: int) -> int:
    """How many of the tokens make all that the client has had, perhaps one or two more; more than there are, where they do not."""
    stream = ChoiceStream(choice.index, tokenizer, copy.deepcopy(choice.settings))
    made = 0
    for count, token in enumerate(tokens, start=1):
        made += len(stream.push(TokenDelta(token, 0)))
        if made >= events:
            return count
    return len(tokens) + 1


def _from_memory(choice: PreparedChoice, account: AnswerSoFar, tokenizer: Tokenizer, events: int) -> PreparedChoice:
    begun = account.chosen[: _usable(choice, account.chosen, tokenizer, events)]
    return msgspec.structs.replace(
        choice, request=msgspec.structs.replace(choice.request, begun=begun), remembered=account.chosen
    )


def _usable(choice: PreparedChoice, tokens: Sequence[int], tokenizer: Tokenizer, events: int) -> int:
    """How many tokens need not be computed again. Their log probabilities are not remembered: those the client must have had."""
    if not choice.settings.wants_logprobs:
        return len(tokens)
    stream = ChoiceStream(choice.index, tokenizer, copy.deepcopy(choice.settings))
    made, usable = _MOST_BEFORE_TOKENS, 0
    for count, token in enumerate(tokens, start=1):
        made += len(stream.push(TokenDelta(token, 0)))
        if made > events:
            break
        usable = usable if stream.is_holding_logprobs else count
    return usable


def call_ids(name: bytes) -> Callable[[], str]:
    """Ids of an answer's tool calls, one after the other: the same whoever makes it. Nine letters and digits, as Mistral's need."""
    count = 0

    def next_id() -> str:
        nonlocal count
        count += 1
        digest = hashlib.sha256(b"potluck call %d " % count + name).digest()
        return "".join(_CALL_ID_ALPHABET[byte % len(_CALL_ID_ALPHABET)] for byte in digest[:9])

    return next_id
