"""What is believed of an advert before anybody asks who its signer is."""

import msgspec
import pytest

from potluck.core.errors import RecordRefused
from potluck.identity.signed import Signed, sign
from potluck.swarm import adverts as adverts_module
from potluck.swarm.adverts import (
    MAX_ADVERT_BYTES,
    MAX_LIFETIME_S,
    MAX_UNWELL,
    AdvertReader,
    HeldWeights,
    advert_lifetime_s,
    read_advert,
    sign_advert,
)
from potluck.wire.messages import Stage
from tests.support.swarm_records import KEYS, advert, shard, signed

ONE, TWO = KEYS[0], KEYS[1]


def reason(record: Signed) -> str:
    with pytest.raises(RecordRefused) as caught:
        read_advert(record)
    return caught.value.reason


def test_an_advert_comes_back_as_it_was_signed() -> None:
    told = advert(ONE, 3, 7, shards=(shard(),), held=(HeldWeights("5" * 64, ((0, 4),)),), threads=8, is_draining=True)
    assert read_advert(sign_advert(ONE, told)).advert == told


@pytest.mark.parametrize(("timeout_s", "lifetime_s"), [(30.0, 120), (2.6, 11), (0.1, 10), (3600.0, MAX_LIFETIME_S)])
def test_an_advert_holds_four_health_timeouts_and_long_enough_to_arrive(timeout_s: float, lifetime_s: int) -> None:
    """Over all of what a configuration may name."""
    assert advert_lifetime_s(timeout_s) == lifetime_s


def test_an_altered_advert_is_forged() -> None:
    record = signed(ONE)
    altered = msgspec.structs.replace(record, payload=record.payload[:-1] + bytes([record.payload[-1] ^ 1]))
    assert reason(altered) == "forged"


def test_an_advert_about_somebody_else_is_forged() -> None:
    assert reason(sign_advert(TWO, advert(ONE))) == "forged"


def test_another_kind_of_statement_is_no_advert() -> None:
    record = sign(ONE, "member", msgspec.msgpack.encode(advert(ONE)))
    assert reason(msgspec.structs.replace(record, kind="advert")) == "forged"


def test_a_payload_that_is_no_advert_is_malformed() -> None:
    assert reason(sign(ONE, "advert", b"\xc1rubbish")) == "malformed"
    assert reason(sign(ONE, "advert", msgspec.msgpack.encode([ONE.node_id, -1]))) == "malformed"


@pytest.mark.parametrize("fields", [{"lifetime_s": MAX_LIFETIME_S + 1}, {"version": 1 << 50}, {"incarnation": 1 << 50}])
def test_an_advert_from_the_future_is_not_believed(fields: dict[str, int]) -> None:
    assert reason(signed(ONE, **fields)) == "future_dated"  # type: ignore[arg-type]


def test_an_advert_has_a_size() -> None:
    with pytest.raises(RecordRefused, match="bytes"):
        signed(ONE, shards=(msgspec.structs.replace(shard(), model="m" * 256),) * 64)
    assert reason(sign(ONE, "advert", bytes(MAX_ADVERT_BYTES + 1))) == "too_large"


def test_fields_of_a_later_version_are_passed_over() -> None:
    payload = msgspec.msgpack.encode([*msgspec.to_builtins(advert(ONE), builtin_types=(bytes,)), "a new field"])
    assert read_advert(sign(ONE, "advert", payload)).advert == advert(ONE)


def test_an_advert_of_an_earlier_version_has_no_word_of_what_fails() -> None:
    *earlier, unwell = msgspec.to_builtins(advert(ONE, unwell=("5" * 64,)), builtin_types=(bytes,))
    assert unwell == ("5" * 64,)
    assert read_advert(sign(ONE, "advert", msgspec.msgpack.encode(earlier))).advert == advert(ONE)


@pytest.mark.parametrize("unwell", [("5" * 64,) * (MAX_UNWELL + 1), ("5" * 257,), (5,), "5" * 64])
def test_what_fails_is_a_bounded_list_of_hashes(unwell: object) -> None:
    assert reason(signed(ONE, unwell=unwell)) == "malformed"


def test_a_refresh_says_the_same_and_is_another_record() -> None:
    first, second, other = (
        read_advert(signed(ONE, 1, version, threads=threads)) for version, threads in ((1, 1), (2, 1), (3, 2))
    )
    assert first.content == second.content != other.content
    assert first.hash != second.hash


def test_each_record_is_verified_once() -> None:
    checked: list[Signed] = []
    reader = AdvertReader(lambda record: not checked.append(record))
    record = signed(ONE)
    assert reader.read(record) is reader.read(record)
    assert len(checked) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"pinned": (5, 5)},
        {"pinned": (7, 3)},
        {"held": (HeldWeights("5" * 64, ((4, 2),)),)},
        {"intended": (HeldWeights("5" * 64, ((4, 4),)),)},
        {"shards": (shard(4, 2),)},
        {"shards": (shard(5, 5),)},
        {"shards": (shard(6, 9),)},
        {"shards": (msgspec.structs.replace(shard(2, 4), stage=Stage(2, 4, True, False)),)},
        {"shards": (msgspec.structs.replace(shard(2, 4), stage=Stage(2, 4, False, True)),)},
        {"shards": (msgspec.structs.replace(shard(), queue_depth=-1),)},
        {"shards": (msgspec.structs.replace(shard(), step_us=-1),)},
    ],
)
def test_layers_that_no_model_can_have_are_malformed(fields: dict[str, object]) -> None:
    assert reason(signed(ONE, **fields)) == "malformed"


def test_the_ends_of_a_model_are_something_without_any_layer() -> None:
    ends = (Stage(0, 0, True, False), Stage(8, 8, False, True))
    told = advert(ONE, shards=tuple(msgspec.structs.replace(shard(), stage=stage) for stage in ends))
    assert read_advert(sign_advert(ONE, told)).advert == told


def test_what_a_reader_remembers_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adverts_module, "_CACHED_BYTES", 4000)
    reader = AdvertReader(lambda record: True)
    for version in range(1, 200):
        reader.read(signed(KEYS[1], 1, version))
    assert 0 < reader.cached_bytes <= 4000
    assert reader.cached_bytes == sum(len(record.payload) for record in reader._read)
