"""Mutated frames against everything that parses what comes from the network: typed errors only, in bounded time and memory.

All damage is drawn from a seed; a failure prints the input that caused it.
"""

import contextlib
import os
import random
import resource
import ssl
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import get_args

import msgspec
import numpy as np
import pytest

from potluck.core.errors import PeerRefused, ProtocolViolation, RecordRefused, WrongPeer
from potluck.core.limits import TENSOR_CHUNK_BYTES
from potluck.identity.certificates import certificate_node_id, certificate_pem
from potluck.identity.keys import NodeKey
from potluck.swarm.adverts import Advert, read_advert, sign_advert
from potluck.swarm.asking import MAX_REMEMBERED
from potluck.wire.channel import Channel
from potluck.wire.codecs import check_rows, decode, encode
from potluck.wire.frame_writer import FrameWriter
from potluck.wire.frames import HEADER_BYTES
from potluck.wire.handshake import AccepterHandshake, DialerHandshake, Ticket
from potluck.wire.messages import (
    AgedRecord,
    AnswerData,
    Buckets,
    BulkLink,
    Chaos,
    ChunkData,
    Credit,
    Described,
    Digests,
    Failed,
    Fault,
    GetAnswer,
    GetChunk,
    GetHoldings,
    GetTokenizer,
    Holdings,
    Hop,
    Message,
    Neighbour,
    Opened,
    Ping,
    Pong,
    Probe,
    Probed,
    Records,
    Refused,
    Replay,
    Result,
    Rewire,
    Rewired,
    ShardInfo,
    ShardLost,
    Stage,
    Summary,
    Suspicion,
    SwarmMessage,
    TellMe,
    TokenizerData,
    Truncate,
    Wanted,
    Wiring,
)
from potluck.wire.spent import add_spent
from potluck.wire.work import FromWorker, ToWorker
from potluck.wire.work_frames import WorkDecoder, from_worker_decoder, to_worker_decoder
from potluck.wire.work_frames import encode as encode_work
from tests.support.swarm_records import KEYS, People, gossip, records, signed
from tests.support.wire_messages import close, describe, opening, session_id, step
from tests.support.work_messages import FROM_WORKER, TO_WORKER

FRAMES = 10_000_000 if os.environ.get("POTLUCK_LONG") else 100_000
MAX_SECONDS = 0.1
MAX_BYTES = 64 << 20

SESSION = session_id(1)
NODE = bytes(range(32))
FROM = Neighbour(node=NODE, session=session_id(3))
HOP = Hop(node=NODE, address="127.0.0.1:7777", session=session_id(2))
WIRING = Wiring(previous=FROM, next=HOP, ring=HOP, ring_from=FROM, forward_from=3, stages=2)
SHARD = ShardInfo(
    model="model",
    weights_sha256="0" * 64,
    arithmetic=1,
    layer_count=30,
    stage=Stage(start=0, stop=15, has_embedding=True),
    is_loaded=True,
    max_streams=8,
    streams=1,
    queue_depth=0,
    step_us=900,
)
ADVERT_RECORD = sign_advert(
    NodeKey.from_seed(bytes(32)),
    Advert(node=NodeKey.from_seed(bytes(32)).node_id, addresses=("127.0.0.1:7777",), shards=(SHARD,)),
)
MESSAGES: tuple[tuple[Message, bytes], ...] = (
    (opening(1, 30), b""),
    (Opened(session=SESSION, epoch=1), b""),
    (Refused(session=SESSION, epoch=1, code="kv_budget_exceeded", message="no room"), b""),
    (step(1, 7), b"\x01" * 300),
    (msgspec.structs.replace(step(1, 7), source=session_id(3)), b"\x01" * 300),
    (
        Result(
            session=SESSION,
            epoch=1,
            position=8,
            token=77,
            logprob=-1.5,
            top=((1, -0.5), (2, -0.7)),
            spent=add_spent(add_spent(b"", 5, 2), 3, 1),
        ),
        b"\x03" * 90,
    ),
    (Rewire(session=SESSION, epoch=2, length=8, wiring=WIRING, sampler=opening(1, 30).sampler), b""),
    (Rewired(session=SESSION, epoch=2, length=8, outbox_from=2), b""),
    (Replay(session=SESSION, epoch=2, start=0, stop=8), b""),
    (Truncate(session=SESSION, epoch=2, length=3), b""),
    (Credit(session=SESSION, epoch=2, tokens=16), b""),
    (close(1), b""),
    (Chaos(nonce=3), b""),
    (ShardLost(session=SESSION, node=NODE, model="model", stage=SHARD.stage, reason="gone"), b""),
    (Probe(session=SESSION, nonce=9), b""),
    (Probed(session=SESSION, nonce=9, is_known=True, worker_idle_us=3, position_in=4, position_out=3), b""),
    (Fault(session=SESSION, epoch=2, code="shard_unavailable", message="gone", culprit=NODE), b""),
    (describe(4), b""),
    (Described(nonce=4, node=NODE, version="0.1.0", shards=(SHARD, SHARD), daemon_pid=1, worker_pids=(2, 3)), b""),
    (GetTokenizer(nonce=5, weights_sha256="0" * 64), b""),
    (TokenizerData(nonce=5, manifest_bytes=100, tokenizer_bytes=100), b"\x02" * 200),
    (GetAnswer(nonce=5, proof=bytes(32)), b""),
    (AnswerData(nonce=5, prompt_length=3), b"\x04" * 40),
    (BulkLink(), b""),
    (GetHoldings(nonce=6, weights_sha256="0" * 64), b""),
    (Holdings(nonce=6, ranges=((0, 10), (12, 272))), b""),
    (GetChunk(nonce=7, weights_sha256="0" * 64, tensor="layers.3.query", chunk=2), b""),
    (ChunkData(nonce=7), b"\x03" * 500),
    (Failed(nonce=5, code="model_not_found", message="no such model"), b""),
    (Ping(nonce=6), b""),
    (Pong(nonce=6), b""),
    (Summary(root=bytes(8), count=3), b""),
    (Buckets(hashes=bytes(range(128))), b""),
    (Digests(buckets=bytes(range(16)), entries=bytes(range(28 * 3))), b""),
    (Wanted(keys=bytes(range(16))), b""),
    (Records(records=(AgedRecord(ADVERT_RECORD, 250), AgedRecord(ADVERT_RECORD, 0))), b""),
    (Suspicion(node=NODE, incarnation=3, version=9), b""),
    (TellMe(is_wanted=True), b""),
)


def test_every_message_is_here() -> None:
    assert {type(message) for message, _ in MESSAGES} == set(get_args(Message))


INTERESTING = (
    0,
    1,
    2,
    4,
    15,
    16,
    17,
    24,
    255,
    256,
    0xFFFF,
    1 << 16,
    (1 << 16) + 1,
    1 << 18,
    (1 << 18) + 1,
    1 << 20,
    (1 << 20) + 1,
)
INTERESTING += (1 << 23, (1 << 23) + 1, 1 << 28, (1 << 28) + 1, 1 << 31, 0x7FFFFFFF, 0xFFFFFFFF)
# msgpack's own: lengths that lie, nesting, each type's first byte
MSGPACK = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\x91" * 64,
)
MSGPACK += (
    b"\xc0",
    b"\xc1",
    b"\xc2",
    b"\xcb\x7f\xf8\0\0\0\0\0\0",
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xd9\xff",
    b"\xa4\xff\xfe\xfd\xfc",
)
MSGPACK += (
    b"\x80",
    b"\x90",
    b"\xa0",
    b"\xc4\0",
    b"\xc7\x04\xffabcd",
    b"\xd6\xff\0\0\0\1",
    b"\xdc\xff\xff",
    b"\xde\xff\xff",
    b"\xff",
)


def encoded(message: Message, body: bytes) -> bytes:
    writer = FrameWriter()
    writer.push(message, body)
    return b"".join(writer.take(1 << 30))


FRAMES_OF_MESSAGES = [encoded(message, body) for message, body in MESSAGES]

Mutation = Callable[[bytearray, random.Random], None]


def flip(data: bytearray, chance: random.Random) -> None:
    data[int(chance.random() * len(data))] ^= 1 << chance.getrandbits(3)


def flip_in_meta(data: bytearray, chance: random.Random) -> None:
    data[min(HEADER_BYTES + int(chance.random() ** 2 * 200), len(data) - 1)] ^= 1 << chance.getrandbits(3)


def set_byte(data: bytearray, chance: random.Random) -> None:
    data[int(chance.random() * len(data))] = chance.getrandbits(8)


def set_header(data: bytearray, chance: random.Random) -> None:
    place = (0, 1, 2, 4, 8, 12, 16, 20)[chance.getrandbits(3)]
    number = INTERESTING[int(chance.random() * len(INTERESTING))]
    if place < 2:
        data[place] = number & 0xFF
    else:
        data[place : place + 4] = number.to_bytes(4, "little")


def plant(data: bytearray, chance: random.Random) -> None:
    """Another msgpack value somewhere, with the header's lengths left as they are."""
    value = MSGPACK[int(chance.random() * len(MSGPACK))]
    place = min(HEADER_BYTES + int(chance.random() * (len(data) - HEADER_BYTES)), len(data) - 1)
    data[place : place + len(value)] = value


def plant_and_fit(data: bytearray, chance: random.Random) -> None:
    """Another msgpack value in the meta of a message without body, with lengths that fit."""
    plant(data, chance)
    size = len(data) - HEADER_BYTES
    data[8:12] = data[12:16] = size.to_bytes(4, "little")
    data[16:20] = bytes(4)


def cut_out(data: bytearray, chance: random.Random) -> None:
    start = int(chance.random() * len(data))
    del data[start : start + 1 + chance.getrandbits(4)]
    data += bytes(HEADER_BYTES)


def insert(data: bytearray, chance: random.Random) -> None:
    start = int(chance.random() * len(data))
    data[start:start] = chance.randbytes(1 + chance.getrandbits(3))


def splice(data: bytearray, chance: random.Random) -> None:
    other = FRAMES_OF_MESSAGES[int(chance.random() * len(FRAMES_OF_MESSAGES))]
    data[HEADER_BYTES:] = other[HEADER_BYTES:]


MUTATIONS: tuple[Mutation, ...] = (
    flip,
    flip_in_meta,
    flip_in_meta,
    set_byte,
    set_header,
    plant,
    plant_and_fit,
    cut_out,
    insert,
    splice,
)


def mutated_frames(seed: int, count: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    bases, mutations = len(FRAMES_OF_MESSAGES), len(MUTATIONS)
    for _ in range(count):
        data = bytearray(FRAMES_OF_MESSAGES[int(chance.random() * bases)])
        MUTATIONS[int(chance.random() * mutations)](data, chance)
        if chance.random() < 0.2:
            MUTATIONS[int(chance.random() * mutations)](data, chance)
        yield bytes(data)


def feed(channel: Channel, data: bytes) -> bool:
    """Whether the channel survived."""
    try:
        for received in channel.receive(data):
            channel.consumed(received)
    except ProtocolViolation:
        return False
    return True


def seconds_for(data: bytes) -> float:
    start = time.perf_counter()
    feed(Channel(), data)
    return time.perf_counter() - start


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_mutated_frames() -> None:
    """Each on a channel that has seen only good ones; a broken one is replaced. A good frame follows now and then."""
    channel, slowest_s, broken, before = Channel(), 0.0, 0, peak_bytes()
    clock, good = time.perf_counter, FRAMES_OF_MESSAGES[3]
    for data in mutated_frames(1, FRAMES):
        start = clock()
        try:
            is_alive = feed(channel, data)
        except BaseException:
            print(f"input: {data.hex()}")
            raise
        elapsed_s = clock() - start
        if elapsed_s > MAX_SECONDS:  # the machine is shared: what is slow once may have had to wait
            elapsed_s = min(elapsed_s, *(seconds_for(data) for _ in range(3)))
        slowest_s = max(slowest_s, elapsed_s)
        if not is_alive or channel._decoder._frame_left or channel._decoder._header:
            broken += not is_alive
            channel = Channel()
    assert feed(Channel(), good)
    assert slowest_s < MAX_SECONDS
    assert FRAMES * 0.5 < broken < FRAMES  # the damage is neither idle nor always fatal
    assert peak_bytes() - before < MAX_BYTES


def test_mutated_frames_take_little_memory() -> None:
    for data in mutated_frames(2, FRAMES // 100):
        channel = Channel()
        tracemalloc.start()
        try:
            feed(channel, data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20, data.hex()


def test_mutated_conversations() -> None:
    """Long streams with several large messages under way, cut anywhere, damaged in one header or anywhere."""
    chance = random.Random(3)
    for number in range(FRAMES // 500):
        stream = bytearray(conversation(chance))
        headers = header_places(bytes(stream))
        for _ in range(1 + chance.getrandbits(1)):
            place = chance.choice(headers)
            part = stream[place : place + HEADER_BYTES]
            (set_header if chance.random() < 0.7 else flip)(part, chance)
            stream[place : place + HEADER_BYTES] = part
        channel, start = Channel(), time.perf_counter()
        data, place = bytes(stream), 0
        while place < len(data):
            size = chance.choice((1, 23, 24, 25, 1000, 60_000, 500_000))
            if not feed(channel, data[place : place + size]):
                break
            place += size
        assert time.perf_counter() - start < MAX_SECONDS * 10, number  # several megabytes


def conversation(chance: random.Random) -> bytes:
    writer = FrameWriter()
    for number in range(6):
        message = step(chance.randrange(3), number)
        writer.push(message, bytes(chance.choice((0, 100, 70_000, 150_000, TENSOR_CHUNK_BYTES + 70_000))))
    writer.grant(1, 3)
    return b"".join(writer.take(1 << 30))


def header_places(stream: bytes) -> list[int]:
    places, place = [], 0
    while place < len(stream):
        places.append(place)
        place += HEADER_BYTES + int.from_bytes(stream[place + 8 : place + 12], "little")
    return places


def test_noise() -> None:
    chance = random.Random(4)
    for _ in range(FRAMES // 20):
        feed(Channel(), chance.randbytes(chance.randrange(200)))


def test_bombs_are_refused_before_memory_is_taken() -> None:
    """Lengths that lie, nesting and wide maps, inside otherwise good messages: refused in little time and memory."""
    head = b"\x9c\xa4open\xc4\x10" + SESSION + b"\0" + b"\xa5model" + b"\xd9\x40" + b"0" * 64
    sampler = b"\x01\x94\0\x0f\xc2\xc2\x64\x96\xc0\xc0\xc0\xc0\0\x01\x90"
    entries = b"".join(b"\xce" + number.to_bytes(4, "big") + b"\x01" for number in range(1 << 20))
    wide = b"\xdf" + (1 << 20).to_bytes(4, "big") + entries
    params = b"\x96\x81\xaalogit_bias" + wide
    history = b"\x96\x80\0\0\xdd\x7f\xff\xff\xff"
    for meta in (head + sampler + params, head + sampler + history, b"\x91" * 200_000, head + b"\x91" * 200_000):
        kind = 1 if len(meta) <= 256 << 10 else 2
        stream = int.from_bytes(SESSION[:4], "little")
        data, place = [], 0
        while place < len(meta):
            part = meta[place : place + TENSOR_CHUNK_BYTES]
            fields = (kind, stream, len(part), len(meta), 0, 0) if place == 0 else (3, stream, len(part), 0, 0, place)
            data.append(
                fields[0].to_bytes(4, "little") + b"".join(field.to_bytes(4, "little") for field in fields[1:]) + part
            )
            place += len(part)
        channel = Channel()
        tracemalloc.start()
        start = time.perf_counter()
        survived = all(feed(channel, each) for each in data)
        elapsed_s = time.perf_counter() - start
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert not survived
        assert elapsed_s < MAX_SECONDS * 10  # tracing is slow
        assert peak < MAX_BYTES


@pytest.mark.parametrize("seed", range(4))
def test_mutated_handshakes(seed: int) -> None:
    chance = random.Random(seed)
    accepter_key, dialer_key = NodeKey.from_seed(bytes(32)), NodeKey.from_seed(b"\x01" * 32)
    for _ in range(FRAMES // 400):
        accepter = AccepterHandshake(accepter_key, bytes(32))
        ticket = Ticket(b"\x01" * 8, bytes(16)) if chance.random() < 0.5 else None
        dialer = DialerHandshake(dialer_key, accepter_key.node_id, bytes(32), ticket)
        hello = bytearray(accepter.hello)
        auth = bytearray(dialer.auth(accepter.hello))
        accepter.check_auth(bytes(auth))
        verdict = bytearray(accepter.verdict(None if chance.random() < 0.5 else "not today"))
        for data in (hello, auth, verdict):
            flip(data, chance)
        attempts = ((dialer.check_verdict, verdict), (accepter.check_auth, auth), (dialer.auth, hello))
        for attempt, data in attempts:
            with contextlib.suppress(ProtocolViolation, WrongPeer, PeerRefused):
                attempt(bytes(data))


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_mutated_certificates() -> None:
    chance = random.Random(5)
    der = ssl.PEM_cert_to_DER_cert(certificate_pem(NodeKey.from_seed(bytes(32))).decode())
    for _ in range(FRAMES // 20):
        data = bytearray(der)
        for _ in range(1 + chance.getrandbits(2)):
            chance.choice((flip, set_byte, insert, cut_out))(data, chance)
        try:
            assert len(certificate_node_id(bytes(data))) == 32
        except ProtocolViolation:
            continue


def test_mutated_activations() -> None:
    chance = random.Random(6)
    rows = np.random.default_rng(6).standard_normal((3, 70)).astype(np.float32)
    for codec in ("fp32", "fp16", "int8"):
        good = encode(codec, rows)
        for _ in range(FRAMES // 50):
            data = bytearray(good)
            chance.choice((flip, set_byte, insert, cut_out))(data, chance)
            try:
                decoded = decode(codec, bytes(data), 3, 70)
            except ProtocolViolation:
                continue
            problem = check_rows(decoded, 1e4)
            assert problem is not None or np.isfinite(decoded).all()


def test_mutated_adverts() -> None:
    """Payloads that their node signed all the same: nobody but a member gets so far, and it may be a hostile one."""
    chance = random.Random(7)
    for _ in range(FRAMES // 50):
        data = bytearray(ADVERT_RECORD.payload)
        for _ in range(1 + chance.getrandbits(1)):
            chance.choice((flip, set_byte, insert, cut_out))(data, chance)
        record = msgspec.structs.replace(ADVERT_RECORD, payload=bytes(data))
        with contextlib.suppress(RecordRefused):
            read_advert(record, lambda _: True)


def test_a_members_rubbish_leaves_gossip_as_it_was() -> None:
    """Digests, keys, hashes and records drawn at random: nothing is raised, kept without end, or believed."""
    chance, people = random.Random(8), People(*KEYS[:3])
    node, now_s = gossip(KEYS[0], people), 100.0
    node.on_message(KEYS[1].node_id, records(signed(KEYS[1], lifetime_s=7200), signed(KEYS[2], lifetime_s=7200)), now_s)
    for _ in range(FRAMES // 100):
        now_s += chance.random() / 10
        rubbish: tuple[SwarmMessage, ...] = (
            Pong(chance.getrandbits(60)),
            Summary(chance.randbytes(8), chance.getrandbits(40)),
            Buckets(chance.randbytes(8 * chance.choice((16, 17, 256)))),
            Digests(chance.randbytes(chance.choice((0, 3))), chance.randbytes(28 * chance.randrange(40))),
            Wanted(chance.randbytes(8 * chance.randrange(40))),
            Suspicion(chance.choice(KEYS).node_id, chance.getrandbits(2), chance.getrandbits(2)),
            TellMe(chance.random() < 0.5),
            records(msgspec.structs.replace(ADVERT_RECORD, signer=KEYS[2].node_id, signature=chance.randbytes(64))),
        )
        node.on_message(KEYS[1].node_id, chance.choice(rubbish), now_s)
    assert {each.node for each in node.adverts()} == {KEYS[1].node_id, KEYS[2].node_id}
    assert node.intake.asking.remembered <= MAX_REMEMBERED
    assert node.counters["forged"] > 0


# ---------------------------------------------------------------- between a daemon and its worker

WORK_HEADER_BYTES = 8  # bytes of the message, bytes of the body


def test_every_message_to_and_from_a_worker_is_here() -> None:
    assert {type(message) for message, _ in TO_WORKER} == set(get_args(ToWorker))
    assert {type(message) for message, _ in FROM_WORKER} == set(get_args(FromWorker))


def set_work_header(data: bytearray, chance: random.Random) -> None:
    place = chance.choice((0, 4))
    data[place : place + 4] = chance.choice(INTERESTING).to_bytes(4, "little")


def plant_in_work(data: bytearray, chance: random.Random) -> None:
    """Another msgpack value somewhere in the message; half the time with a length that fits, and then it has no body."""
    value = chance.choice(MSGPACK)
    place = chance.randrange(WORK_HEADER_BYTES, len(data))
    data[place : place + len(value)] = value
    if chance.random() < 0.5:
        data[:8] = (len(data) - WORK_HEADER_BYTES).to_bytes(4, "little") + bytes(4)


WORK_MUTATIONS: tuple[Mutation, ...] = (flip, set_byte, set_work_header, plant_in_work, plant_in_work, cut_out, insert)


def work_is_understood(decoder: WorkDecoder[ToWorker] | WorkDecoder[FromWorker], data: bytes, size: int) -> bool:
    """Fed in pieces of `size`, as a stream cuts them."""
    try:
        for place in range(0, len(data), size):
            decoder.feed(data[place : place + size])
    except ProtocolViolation:
        return False
    return True


@pytest.mark.parametrize("direction", ["to the worker", "from the worker"])
def test_mutated_work_frames(direction: str) -> None:
    """A broken worker must not break its daemon, nor take its time or memory."""
    chance, refused, before = random.Random(f"work {direction}"), 0, peak_bytes()
    messages = TO_WORKER if direction == "to the worker" else FROM_WORKER
    frames = [b"".join(encode_work(message, body)) for message, body in messages]
    for _ in range(FRAMES // 20):
        data = bytearray(chance.choice(frames))
        for _ in range(1 + chance.getrandbits(1)):
            chance.choice(WORK_MUTATIONS)(data, chance)
        good, size = chance.choice(frames), chance.choice((7, 64, 1 << 16))
        decoder = to_worker_decoder() if messages is TO_WORKER else from_worker_decoder()
        start = time.perf_counter()
        try:
            refused += not work_is_understood(decoder, bytes(data) + good, size)
        except BaseException:
            print(f"input: {data.hex()}, then {good.hex()}, in pieces of {size}")
            raise
        elapsed_s = time.perf_counter() - start
        assert elapsed_s < MAX_SECONDS * 10, data.hex()  # the machine is shared
    assert FRAMES // 20 * 0.3 < refused < FRAMES // 20  # the damage is neither idle nor always fatal
    assert peak_bytes() - before < MAX_BYTES
