"""Streams that are taken up again: every event of every kind of answer as the last that a client got, with and without memory."""

import base64
import re
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.errors import BadRequest
from potluck.core.remembered import AnswerSoFar, resume_key
from potluck.gateway.answering import ModelCard
from potluck.gateway.resuming import EventNumbers, Handle, call_ids, read_event_id
from potluck.orchestrator.frames import PipelineAborted, ShardFailover
from potluck.testing.memory_answering import MemoryAnswering
from potluck.wire.messages import Boundary
from tests.support.api import MESSAGES, TOOLS, app_of, events_of, post, with_client

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = 'Well.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CALLS = f"{CALL}\nAnd {CALL}"
HANDLE = Handle(2, bytes(12), bytes(range(16)), 1_700_000_000, b"\xab" * 8, b"\x07" * 8, 64, b"\x05" * 8, 1)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "plain": (CHAT, "Everyone brings a dish.", {}),
    "many bytes a character": (CHAT, "Grüße, 食べ物 und 🍲🥗!", {}),
    "half a character at the end": (CHAT, "ab🍲", {"max_tokens": 4}),
    "a stop string": (CHAT, "One dish, two dishes, th-th-three.", {"stop": ["three", "zzz"]}),
    "a stop string that does not come": (CHAT, "th-thr-thre", {"stop": ["three"]}),
    "a limit": (CHAT, "abcdefgh", {"max_tokens": 5}),
    "tool calls": (CHAT, CALLS, {"tools": TOOLS}),
    "logprobs": (CHAT, "a🍲 th-thr", {"logprobs": True, "top_logprobs": 2, "stop": ["three"]}),
    "logprobs and calls": (CHAT, CALL, {"tools": TOOLS, "logprobs": True}),
    "a completion": (COMPLETIONS, " upon a time", {"max_tokens": 40}),
    "an echo": (COMPLETIONS, " upon a 🍲", {"echo": True, "max_tokens": 40}),
    "a completion's logprobs": (COMPLETIONS, " upon a 🍲", {"logprobs": 1, "max_tokens": 40}),
}


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    asked: dict[str, Any] = {"messages": MESSAGES} if path == CHAT else {"prompt": "Once"}
    return {"model": "memory", "stream": True, "stream_options": {"include_usage": True}, **asked, **fields}


def split(response: httpx.Response) -> list[tuple[str, str]]:
    """Each event as (id, the line of data)."""
    assert response.status_code == 200, response.text
    blocks = re.sub(r"^:.*\n", "", response.text, flags=re.MULTILINE).split("\n\n")[:-1]
    found = [re.fullmatch(r"id: (\S+)\n(data: .*)", block) for block in blocks]
    assert all(found), response.text
    return [(match.group(1), match.group(2)) for match in found if match is not None]


def shown(events: Sequence[tuple[str, str]]) -> list[str]:
    """What a client gets, but for the nodes that took part: where all was remembered there are none."""
    return [re.sub(r'"nodes":\[[^]]*\]', "", data) for _, data in events]


def first_id(response: httpx.Response) -> str:
    return split(response)[0][0]


def resume(answering: MemoryAnswering, path: str, body: dict[str, Any], event_id: str) -> httpx.Response:
    return post(app_of(answering), path, body, Last_Event_ID=event_id)


# ------------------------------------------------------------ the same events, whoever makes them


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_event_was_the_last_the_others_follow_to_the_byte(kind: str) -> None:
    path, text, fields = KINDS[kind]
    body, first, second = body_of(path, fields), MemoryAnswering(text), MemoryAnswering(text)
    whole = split(post(app_of(first), path, body))
    tokens = tuple(first.model.tokenizer.encode(text, parse_special=True, add_special=False))
    [request] = first.model.requests
    key = resume_key(read_event_id(whole[0][0]).handle.secret)
    limited = tokens[: request.max_tokens]
    remembered = [None, *(limited[:count] for count in range(0, len(limited) + 1, max(1, len(limited) // 5)))]

    async def use(client: httpx.AsyncClient) -> None:
        for chosen in remembered:
            second.model.remembered = (
                {} if chosen is None else {key: AnswerSoFar(len(request.prompt), (*request.prompt, *chosen))}
            )
            for event_id, _ in whole[:: 1 if chosen is None or len(whole) < 40 else 4]:
                rest = split(await client.post(path, json=body, headers={"Last-Event-ID": event_id}))
                had = read_event_id(event_id).events
                assert shown((*whole[:had], *rest)) == shown(whole), (event_id, chosen)
                assert [read_event_id(each).events for each, _ in rest] == list(range(had + 1, len(whole) + 1))

    with_client(app_of(second), use)


def test_an_answer_that_was_taken_up_can_be_taken_up_again() -> None:
    answering, body = MemoryAnswering("Everyone brings a dish."), body_of(CHAT, {"temperature": 1.3})
    whole = split(post(app_of(answering), CHAT, body))
    had, event_id = whole[:3], whole[2][0]
    for _ in range(5):
        rest = split(resume(MemoryAnswering("Everyone brings a dish."), CHAT, body, event_id))
        had, event_id = [*had, *rest[:2]], rest[1][0]
    rest = split(resume(MemoryAnswering("Everyone brings a dish."), CHAT, body, event_id))
    assert [data for _, data in (*had, *rest)] == [data for _, data in whole]


def test_what_is_remembered_is_not_generated_again() -> None:
    answering, body = MemoryAnswering("abcdefgh"), body_of(CHAT, {})
    event_id = split(post(app_of(answering), CHAT, body))[3][0]
    [request] = answering.model.requests
    chosen = tuple(answering.model.tokenizer.encode("abcde", parse_special=False, add_special=False))
    again = MemoryAnswering("abcdefgh")
    key = resume_key(read_event_id(event_id).handle.secret)
    again.model.remembered = {key: AnswerSoFar(len(request.prompt), (*request.prompt, *chosen))}
    resume(again, CHAT, body, event_id)
    assert [asked.begun for asked in again.model.requests] == [chosen]


def test_an_answer_that_had_come_to_its_end_needs_nobody_to_go_on() -> None:
    answering = MemoryAnswering("abc")
    body = body_of(CHAT, {"stream_options": {}})
    whole = split(post(app_of(answering), CHAT, body))
    [request] = answering.model.requests
    tokens = (
        *request.prompt,
        *answering.model.tokenizer.encode("abc", parse_special=False, add_special=False),
        request.eos[0],
    )
    again = MemoryAnswering("abc")
    again.model.remembered = {
        resume_key(read_event_id(whole[0][0]).handle.secret): AnswerSoFar(len(request.prompt), tokens)
    }
    rest = split(resume(again, CHAT, body, whole[1][0]))
    assert [data for _, data in rest] == [data for _, data in whole[2:]]
    assert again.model.requests == []


def test_the_seed_and_the_limit_are_those_it_was_begun_with() -> None:
    answering, body = MemoryAnswering("abc"), body_of(CHAT, {"temperature": 1.0})
    event_id = first_id(post(app_of(answering), CHAT, body))
    again = MemoryAnswering("abc")
    resume(again, CHAT, body, event_id)
    [first], [second] = answering.model.requests, again.model.requests
    assert (first.params.seed, first.max_tokens) == (second.params.seed, second.max_tokens)
    assert second.has_fixed_boundaries
    assert first.resume_key != second.resume_key  # an earlier head that is still at work is not taken for the later one


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "event_id", ["", "x", "a.b", "....", "A" * 1300 + ".1", "AAAA.1", HANDLE.text(), HANDLE.text() + ".-1", HANDLE.text()[:-9] + ".3",
                 HANDLE.text() + ".1x", "é.1", HANDLE.text() + ".1234567890"]
)  # fmt: skip
def test_an_id_that_nobody_made_is_refused(event_id: str) -> None:
    with pytest.raises(BadRequest):
        read_event_id(event_id)


@given(st.text(max_size=200) | st.from_regex(r"[A-Za-z0-9_-]{1,60}\.[0-9]{1,9}", fullmatch=True))
def test_any_other_text_is_refused_too(text: str) -> None:
    with pytest.raises(BadRequest):
        read_event_id(text)


@given(st.integers(0, len(HANDLE.text()) - 1), st.sampled_from("AZaz09_-"))
def test_a_damaged_handle_is_refused_or_is_another_sound_one(place: int, letter: str) -> None:
    text = HANDLE.text()
    try:
        found = read_event_id(f"{text[:place]}{letter}{text[place + 1 :]}.7")
    except BadRequest:
        return
    assert read_event_id(f"{found.handle.text()}.7") == found


def test_a_handle_says_what_it_was_made_of_and_fits_into_a_header() -> None:
    rounded = msgspec.structs.replace(
        HANDLE, boundaries=tuple(Boundary(4096, "fp16") for _ in range(64)), max_tokens=1 << 24, created=1 << 40
    )
    for handle in (HANDLE, rounded):
        assert read_event_id(f"{handle.text()}.999999999") == (handle, 999_999_999)
    assert len(HANDLE.text()) < 100
    assert len(rounded.text()) <= 1200


@pytest.mark.parametrize(
    "change", [{"version": 1}, {"version": 3}, {"request": b""}, {"secret": b"short"}, {"max_tokens": 0}, {"seed": b""}]
)
def test_a_handle_with_other_contents_is_refused(change: dict[str, Any]) -> None:
    data = msgspec.msgpack.encode(msgspec.structs.replace(HANDLE, **change))
    with pytest.raises(BadRequest):
        read_event_id(base64.urlsafe_b64encode(data).decode().rstrip("=") + ".1")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 2}),
        (CHAT, {"stream": False}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}),
        ("/api/chat", {"messages": MESSAGES}),
    ],
)
def test_what_has_no_ids_cannot_be_taken_up(path: str, fields: dict[str, Any]) -> None:
    body = {**(body_of(path, fields) if path.startswith("/v1/c") else {"model": "memory", "stream": True, **fields})}
    plain = post(app_of(MemoryAnswering("abc")), path, body)
    assert plain.status_code == 200
    assert "id: " not in plain.text
    refused = resume(MemoryAnswering("abc"), path, body, f"{HANDLE.text()}.1")
    assert refused.status_code == 400


@pytest.mark.parametrize("layers", [(3,), (1, 1), (2, 1)])
def test_boundaries_that_the_model_cannot_have_are_refused(layers: tuple[int, ...]) -> None:
    event_id = first_id(post(app_of(MemoryAnswering("abc")), CHAT, body_of(CHAT, {})))
    handle = read_event_id(event_id).handle
    forged = msgspec.structs.replace(handle, boundaries=tuple(Boundary(layer, "int8") for layer in layers))
    refused = resume(MemoryAnswering("abc"), CHAT, body_of(CHAT, {}), f"{forged.text()}.1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "last-event-id")


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_other_weights_are_refused() -> None:
    other = MemoryAnswering("abc")
    other.model.card = ModelCard(id="memory", weights_sha256="cd" * 32, created=1)
    event_id = first_id(post(app_of(MemoryAnswering("abc")), CHAT, body_of(CHAT, {})))
    assert code_of(resume(other, CHAT, body_of(CHAT, {}), event_id)) == (409, "resume_impossible")


def test_another_body_than_before_is_refused_where_somebody_remembers() -> None:
    answering, body = MemoryAnswering("abc"), body_of(CHAT, {})
    event_id = first_id(post(app_of(answering), CHAT, body))
    tokens = answering.model.requests[0].prompt
    answering.model.remembered = {
        resume_key(read_event_id(event_id).handle.secret): AnswerSoFar(len(tokens), (*tokens, 5))
    }
    other = {**body, "messages": [{"role": "user", "content": "Something else"}]}
    assert code_of(resume(answering, CHAT, other, event_id)) == (409, "resume_impossible")


@pytest.mark.parametrize("is_remembered", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "Something else"}]}, {"temperature": 0.3}, {"stop": ["b"]}, {"max_tokens": 6},
        {"logit_bias": {"5": -100}}, {"response_format": {"type": "json_object"}}, {"tools": TOOLS}, {"logprobs": True},
    ],
)  # fmt: skip
def test_another_body_is_refused_whoever_remembers(change: dict[str, Any], is_remembered: bool) -> None:
    """The rest of one answer after the beginning of another would be a text that no model has written."""
    answering, body = MemoryAnswering("abc"), body_of(CHAT, {"temperature": 0.0})
    event_id = split(post(app_of(answering), CHAT, body))[2][0]
    tokens = answering.model.requests[0].prompt
    if is_remembered:
        answering.model.remembered = {
            resume_key(read_event_id(event_id).handle.secret): AnswerSoFar(len(tokens), (*tokens, 5))
        }
    assert code_of(resume(answering, CHAT, {**body, **change}, event_id)) == (409, "resume_impossible")


def test_the_same_body_in_other_words_is_the_same_body() -> None:
    body = body_of(CHAT, {"temperature": 0.5, "stop": "zzz", "tools": TOOLS})
    whole = split(post(app_of(MemoryAnswering("abc")), CHAT, body))
    again = {"stop": ["zzz"], "user": "me", **dict(reversed(body.items())), "seed": 12}
    assert len(split(resume(MemoryAnswering("abc"), CHAT, again, whole[2][0]))) == len(whole) - 3


def test_more_events_than_there_are_is_refused() -> None:
    body = body_of(CHAT, {})
    whole = split(post(app_of(MemoryAnswering("abc")), CHAT, body))
    handle = whole[0][0].rpartition(".")[0]
    assert split(resume(MemoryAnswering("abc"), CHAT, body, f"{handle}.{len(whole)}")) == []
    [(_, refusal)] = events_of(resume(MemoryAnswering("abc"), CHAT, body, f"{handle}.{len(whole) + 1}"))
    assert refusal["error"]["code"] == "resume_impossible"


@pytest.mark.parametrize("inexact", ["before", "after"])
def test_what_nobody_remembers_is_made_again_only_where_it_comes_out_the_same(inexact: str) -> None:
    first, second, body = MemoryAnswering("abc"), MemoryAnswering("abc"), body_of(CHAT, {})
    (first if inexact == "before" else second).model.arithmetic = 0
    whole = split(post(app_of(first), CHAT, body))
    assert code_of(resume(second, CHAT, body, whole[2][0])) == (409, "resume_impossible")
    [request] = first.model.requests
    second.model.remembered = {
        resume_key(read_event_id(whole[0][0]).handle.secret): AnswerSoFar(len(request.prompt), (*request.prompt, 100))
    }
    rest = split(resume(second, CHAT, body, whole[1][0]))  # with memory it does not matter
    assert len(rest) == len(whole) - 2
    assert read_event_id(rest[0][0]).handle.arithmetic == 0


class Liars:
    """An answer of eight letters of which a client has had the first three, and what is said about it."""

    def __init__(self, is_bitwise: bool) -> None:
        first, self.second, self.body = MemoryAnswering("abcdefgh"), MemoryAnswering("abcdefgh"), body_of(CHAT, {})
        self.second.model.arithmetic = int(is_bitwise)
        self._whole = split(post(app_of(first), CHAT, self.body))
        [self.request] = first.model.requests
        self._last_id = self._whole[3][0]  # the role was the first
        self._key = resume_key(read_event_id(self._last_id).handle.secret)
        self._tokenizer = first.model.tokenizer

    def account(self, text: str) -> AnswerSoFar:
        chosen = self._tokenizer.encode(text, parse_special=False, add_special=False)
        return AnswerSoFar(len(self.request.prompt), (*self.request.prompt, *chosen))

    def of_another_prompt(self) -> AnswerSoFar:
        return AnswerSoFar(3, (5, 6, 7, *[0] * 50))

    def with_token(self, token: int) -> AnswerSoFar:
        account = self.account("abcde")
        return account._replace(tokens=(*account.tokens, token))

    def too_long(self) -> AnswerSoFar:
        account = self.account("abc")
        return account._replace(tokens=(*account.tokens, *[5] * self.request.max_tokens))

    def resumed(self, told: Sequence[AnswerSoFar], own: AnswerSoFar | None = None) -> httpx.Response:
        self.second.model.remembered = {} if own is None else {self._key: own}
        self.second.model.told = {self._key: told}
        return resume(self.second, CHAT, self.body, self._last_id)

    def begun(self, told: Sequence[AnswerSoFar], own: AnswerSoFar | None = None) -> str:
        """What the generation began with; the client gets the rest of its answer, to the byte."""
        rest = split(self.resumed(told, own))
        assert shown(rest) == shown(self._whole[4:])
        return self._tokenizer.decode(self.second.model.requests[-1].begun)

    def misfits(self) -> list[AnswerSoFar]:
        return [self.of_another_prompt(), self.with_token(-1), self.with_token(1 << 30), self.too_long()]


def test_what_cannot_be_an_account_of_this_answer_counts_for_nothing() -> None:
    """However long it is: otherwise one liar could spoil every reconnect."""
    bitwise, inexact = Liars(is_bitwise=True), Liars(is_bitwise=False)
    for misfit in bitwise.misfits():
        assert bitwise.begun([misfit]) == ""
        assert code_of(inexact.resumed([misfit])) == (409, "resume_impossible")
        for liars in (bitwise, inexact):
            assert liars.begun([misfit, liars.account("abcd"), misfit]) == "abcd"
            assert liars.begun([liars.account("abcd")], own=misfit) == "abcd"


def test_who_contradicts_this_nodes_own_memory_is_not_believed() -> None:
    for liars in (Liars(is_bitwise=True), Liars(is_bitwise=False)):
        lie = liars.account("abXXXXXX")
        assert liars.begun([lie], own=liars.account("abcd")) == "abcd"
        assert liars.begun([lie, liars.account("abcdXXXX")], own=liars.account("abcd")) == "abcd"
        others = [liars.account("aXXXXXXX"), liars.account("abcde")]
        assert liars.begun(others, own=liars.account("ab")) == "abcde"  # its own is too short


def test_no_more_is_believed_of_anybody_than_the_client_has_had() -> None:
    for liars in (Liars(is_bitwise=True), Liars(is_bitwise=False)):
        assert liars.begun([liars.account("abcdeXX"), liars.account("abcde"), liars.account("ab")]) == "abcde"
        assert liars.begun([liars.account("abc"), liars.account("ab")]) == "abc"  # no more than that is known


def test_where_accounts_contradict_each_other_the_answer_is_made_again_or_not_at_all() -> None:
    bitwise, inexact = Liars(is_bitwise=True), Liars(is_bitwise=False)
    for lie in ("abX", "XXXXXXXX"):
        assert bitwise.begun([bitwise.account("abcd"), bitwise.account(lie)]) == ""
        refused = inexact.resumed([inexact.account(lie), inexact.account("abcd")])
        assert code_of(refused) == (409, "resume_impossible")
        assert "contradict each other" in refused.text


def test_tokens_that_come_out_differently_end_the_attempt() -> None:
    """With log probabilities some tokens are computed again, and must be the remembered ones."""
    answering, body = MemoryAnswering("abc"), body_of(CHAT, {"logprobs": True})
    whole = split(post(app_of(answering), CHAT, body))
    [request] = answering.model.requests
    other = MemoryAnswering("axc")
    chosen = answering.model.tokenizer.encode("abc", parse_special=False, add_special=False)
    other.model.remembered = {
        resume_key(read_event_id(whole[0][0]).handle.secret): AnswerSoFar(
            len(request.prompt), (*request.prompt, *chosen)
        )
    }
    assert code_of(resume(other, CHAT, body, whole[1][0])) == (409, "resume_impossible")


def test_after_a_failover_to_other_arithmetic_ids_say_that_it_cannot_be_made_again() -> None:
    answering = MemoryAnswering("abc")
    answering.model.frames_before = {1: [ShardFailover(("a",), ("b",), 1, 5.0, 3, "replay", "mixed")]}
    whole = split(post(app_of(answering), CHAT, body_of(CHAT, {})))
    assert [read_event_id(each).handle.arithmetic for each, _ in whole] == [1, 1, 0, 0, 0, 0, 0]
    fresh = MemoryAnswering("abc")
    fresh.model.frames_before = answering.model.frames_before
    again = resume(fresh, CHAT, body_of(CHAT, {}), whole[1][0])
    assert '"resume_impossible"' in again.text


# ------------------------------------------------------------ an answer that is aborted


def test_an_aborted_answer_names_the_event_to_go_on_after() -> None:
    broken, body = MemoryAnswering("Hi there"), body_of(CHAT, {})
    broken.model.frames_before = {2: [PipelineAborted("shard_unavailable", "nobody holds layers 3-5", 2)]}
    response = post(app_of(broken), CHAT, body)
    *_, (_, error) = events_of(response)
    assert error["error"]["code"] == "shard_unavailable"
    shown = [block for block in response.text.split("\n\n") if block.startswith("id: ")]
    assert shown[-1].startswith(f"id: {error['error']['resume']}\n")
    rest = split(resume(MemoryAnswering("Hi there"), CHAT, body, error["error"]["resume"]))
    texts = [msgspec.json.decode(data[6:])["choices"][0]["delta"].get("content", "") for _, data in rest[:-2]]
    assert "".join(texts) == " there"


def test_numbers_hold_back_what_was_had() -> None:
    numbers = EventNumbers(HANDLE, had=2)
    assert numbers.number(b"data: 1\n\ndata: 2\n\ndata: 3\n\n") == b"id: %s.3\ndata: 3\n\n" % HANDLE.text().encode()
    assert numbers.number(b"") == b""
    assert numbers.last_id == f"{HANDLE.text()}.3"


def test_ids_of_calls_are_nine_letters_or_digits_and_the_same_for_the_same_answer() -> None:
    one, same, other = call_ids(b"a" * 12), call_ids(b"a" * 12), call_ids(b"b" * 12)
    ids = [one() for _ in range(5)]
    assert ids == [same() for _ in range(5)]
    assert len(set(ids)) == 5
    assert other() != ids[0]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids)
