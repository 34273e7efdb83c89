"""What a node states about itself, signed: shards, stored weights, memory, speed, links. Pure; who is believed is decided elsewhere.

An advert says how long it holds, never when it was made: whoever receives it counts from then on, by his own monotonic clock.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from potluck.core.errors import RecordRefused
from potluck.core.limits import DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S
from potluck.identity.keys import NodeKey
from potluck.identity.signed import Signed, sign
from potluck.wire.messages import RECORD_KEY_BYTES, Address, Counting, Layer, Microseconds, Name, NodeId, ShardInfo

ADVERT = "advert"
_LEAST_LIFETIME_S = 10  # what holds for less could expire on its way through a large swarm
MAX_LIFETIME_S = 4 * 3600  # four times the longest health timeout that a configuration may name
MAX_ADVERT_BYTES = 16 << 10
MAX_COUNT = 1 << 40
MAX_LEAP = 1 << 20  # an incarnation or version that is further ahead than any node can have come is not believed
MAX_ADDRESSES, MAX_SHARDS, MAX_HELD, MAX_SPEEDS, MAX_LINKS = 8, 64, 64, 64, 64
MAX_UNWELL = 16  # few, for the whole has to stay within MAX_ADVERT_BYTES
_CACHED, _CACHED_BYTES = 1 << 13, 32 << 20
CPU = "cpu"

Bytes = Annotated[int, Meta(ge=0, lt=1 << 62)]


def advert_lifetime_s(health_timeout_s: float) -> int:
    """Four times the health time-out, as HearthNet §5.1 has it."""
    return max(_LEAST_LIFETIME_S, math.ceil(4 * health_timeout_s))


ADVERT_LIFETIME_S = advert_lifetime_s(DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S)


class HeldWeights(msgspec.Struct, frozen=True, array_like=True):
    """Weights that the node can give to others: ranges start ≤ layer < stop of a model."""

    weights_sha256: Name
    ranges: Annotated[tuple[tuple[Layer, Layer], ...], Meta(max_length=64)]


class LayerSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Measured: what one layer of a model takes for one token."""

    weights_sha256: Name
    layer_us: Microseconds


class LinkFigures(msgspec.Struct, frozen=True, array_like=True):
    """Measured towards another node; a bandwidth of 0 is unknown."""

    node: NodeId
    rtt_us: Microseconds
    bandwidth_bytes_s: Bytes = 0


class Advert(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Later versions may append fields; older nodes pass them on unread."""

    node: NodeId
    incarnation: Counting = 0  # one more at each start, kept on disk
    version: Counting = 0  # one more for each statement of an incarnation
    instance: Annotated[bytes, Meta(min_length=8, max_length=8)] = bytes(8)  # drawn at each start; two at once: a clone
    lifetime_s: Annotated[int, Meta(ge=0, lt=1 << 31)] = ADVERT_LIFETIME_S
    name: Name = ""
    software: Name = ""
    arithmetic: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    shards: Annotated[tuple[ShardInfo, ...], Meta(max_length=MAX_SHARDS)] = ()
    held: Annotated[tuple[HeldWeights, ...], Meta(max_length=MAX_HELD)] = ()
    memory_total_bytes: Bytes = 0
    memory_available_bytes: Bytes = 0
    memory_budget_bytes: Bytes = 0
    speeds: Annotated[tuple[LayerSpeed, ...], Meta(max_length=MAX_SPEEDS)] = ()
    threads: Annotated[int, Meta(ge=0, le=4096)] = 0
    links: Annotated[tuple[LinkFigures, ...], Meta(max_length=MAX_LINKS)] = ()
    is_draining: bool = False
    allows_serving: bool = False
    is_leaving: bool = False  # the last word of an incarnation
    pinned: tuple[Layer, Layer] | None = None  # holds exactly these layers, start ≤ layer < stop, or none
    intended: Annotated[tuple[HeldWeights, ...], Meta(max_length=MAX_HELD)] = ()  # being fetched or loaded now
    max_layers: Layer = 0  # holds no more than so many; 0: as many as there is room for
    device: Name = CPU  # what it computes on; elsewhere than on the CPU all memory figures are the device's
    device_name: Name = ""  # for people
    unwell: Annotated[tuple[Name, ...], Meta(max_length=MAX_UNWELL)] = ()  # weights that it fails to fetch or load now

    @property
    def stamp(self) -> "Stamp":
        return Stamp(self.incarnation, self.version)


class Stamp(NamedTuple):
    """Orders a node's statements. Membership records, which are never replaced, have (0, 0)."""

    incarnation: int
    version: int


class ReadAdvert(msgspec.Struct, frozen=True):
    """`key`: under which it is held; `hash`: of the whole statement; `content`: of what it says, the same for a mere refresh."""

    advert: Advert
    key: bytes
    stamp: Stamp
    hash: int
    content: int


def sign_advert(key: NodeKey, advert: Advert) -> Signed:
    """Raises RecordRefused ("too_large") for one that nobody would take."""
    payload = msgspec.msgpack.encode(advert)
    if len(payload) > MAX_ADVERT_BYTES:
        raise RecordRefused("too_large", f"an advert of {len(payload)} bytes; {MAX_ADVERT_BYTES} are allowed")
    return sign(key, ADVERT, payload)


def advert_key(node: bytes) -> bytes:
    """Under which a node's advert is held, whichever it is."""
    return hashlib.blake2b(b"advert\0" + node, digest_size=RECORD_KEY_BYTES).digest()


def record_hash(record: Signed) -> int:
    """64 bits that name a statement among those of one swarm."""
    data = msgspec.msgpack.encode(record)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


def read_advert(record: Signed, is_authentic: Callable[[Signed], bool] | None = None) -> ReadAdvert:
    """The advert in a record. Raises RecordRefused: too_large, forged, malformed, future_dated."""
    if len(record.payload) > MAX_ADVERT_BYTES:
        raise RecordRefused("too_large", "an advert larger than allowed")
    if not (record.is_authentic if is_authentic is None else is_authentic(record)):
        raise RecordRefused("forged", "an advert that its signer did not sign")
    try:
        advert = msgspec.msgpack.decode(record.payload, type=Advert)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RecordRefused("malformed", "an advert that cannot be read") from None
    if advert.node != record.signer:
        raise RecordRefused("forged", "an advert about somebody else than its signer")
    if not _is_possible(advert):
        raise RecordRefused("malformed", "an advert of layers that no model can have")
    if advert.lifetime_s > MAX_LIFETIME_S or max(advert.stamp) > MAX_COUNT:
        raise RecordRefused("future_dated", "an advert that would hold for too long, or that is ahead of any real one")
    bare = msgspec.structs.replace(advert, incarnation=0, version=0)
    content = hashlib.blake2b(msgspec.msgpack.encode(bare), digest_size=8).digest()
    return ReadAdvert(
        advert, advert_key(advert.node), advert.stamp, record_hash(record), int.from_bytes(content, "big")
    )


def _is_possible(advert: Advert) -> bool:
    """Whether every range in it is one: whoever plans or routes afterwards may rely on that."""
    ranges = [run for held in (*advert.held, *advert.intended) for run in held.ranges]
    ranges += [advert.pinned] if advert.pinned is not None else []
    return all(start < stop for start, stop in ranges) and all(_is_possible_shard(shard) for shard in advert.shards)


def _is_possible_shard(shard: ShardInfo) -> bool:
    """The ends of a model may be held without any layer; nothing lies past its last one."""
    stage = shard.stage
    has_something = stage.start < stage.stop or stage.has_embedding or stage.has_output
    is_inside = stage.start <= stage.stop <= shard.layer_count
    are_ends_right = (not stage.has_embedding or stage.start == 0) and (
        not stage.has_output or stage.stop == shard.layer_count
    )
    is_counted = min(shard.max_streams, shard.streams, shard.queue_depth, shard.step_us) >= 0
    return has_something and is_inside and are_ends_right and is_counted


class AdvertReader:
    """Reads adverts, each once: a record that comes again, from whomever, costs a look-up. May be used by many nodes."""

    def __init__(self, is_authentic: Callable[[Signed], bool] | None = None) -> None:
        self._is_authentic = is_authentic
        self._read: dict[Signed, ReadAdvert] = {}
        self.cached_bytes = 0  # of payloads

    def __repr__(self) -> str:
        return f"<AdvertReader {len(self._read)} cached>"

    def read(self, record: Signed) -> ReadAdvert:
        """See read_advert. Refusals are not remembered: what is kept is only what members signed."""
        known = self._read.get(record)
        if known is None:
            known = read_advert(record, self._is_authentic)
            self._read[record] = known
            self.cached_bytes += len(record.payload)
            while len(self._read) > _CACHED or self.cached_bytes > _CACHED_BYTES:
                oldest = next(iter(self._read))
                del self._read[oldest]
                self.cached_bytes -= len(oldest.payload)
        return known
