"""Members, their adverts, and a gossip to feed them to."""

import random

from potluck.core.errors import RecordRefused
from potluck.identity.keys import NodeKey
from potluck.identity.signed import Signed, sign
from potluck.swarm.acceptance import Trust
from potluck.swarm.adverts import Advert, sign_advert
from potluck.swarm.events import Outcome
from potluck.swarm.gossip import Gossip
from potluck.swarm.own_advert import OwnAdvert
from potluck.wire.effects import SendTo
from potluck.wire.messages import AgedRecord, Message, Records, ShardInfo, Stage

KEYS = tuple(NodeKey.from_seed(bytes([number]) * 32) for number in range(1, 9))
MODEL, WEIGHTS = "model", "5" * 64


class People:
    """Who belongs, as a test says; membership records name a node, and only the first key may sign them."""

    def __init__(self, *members: NodeKey) -> None:
        self.members = {key.node_id for key in members}
        self.expelled: set[bytes] = set()

    def accept(self, record: Signed) -> None:
        if record.signer != KEYS[0].node_id:
            raise RecordRefused("unauthorised", "not the founder")
        if record.kind == "delegated" and record.payload not in self.members:
            raise RecordRefused("premature", "what this rests on is not known")
        if record.kind == "expulsion":
            self.members.discard(record.payload)
            self.expelled.add(record.payload)
        else:
            self.members.add(record.payload)

    def trust(self) -> Trust:
        return Trust(self.accept, self.members.__contains__, self.expelled.__contains__)


def shard(start: int = 0, stop: int = 4, layer_count: int = 8) -> ShardInfo:
    stage = Stage(start, stop, start == 0, stop == layer_count)
    return ShardInfo(MODEL, WEIGHTS, 1, layer_count, stage, True, 16, 0, 0, 1000)


def advert(key: NodeKey, incarnation: int = 1, version: int = 1, **fields: object) -> Advert:
    told: dict[str, object] = {"addresses": (f"host-{key.node_id.hex()[:4]}:1",), "instance": key.node_id[:8], **fields}
    return Advert(node=key.node_id, incarnation=incarnation, version=version, **told)  # type: ignore[arg-type]


def signed(key: NodeKey, incarnation: int = 1, version: int = 1, **fields: object) -> Signed:
    return sign_advert(key, advert(key, incarnation, version, **fields))


def member_record(key: NodeKey, kind: str = "member") -> Signed:
    return sign(KEYS[0], kind, key.node_id)


def records(*told: Signed, age_s: float = 0.0) -> Records:
    return Records(tuple(AgedRecord(each, int(age_s * 1000)) for each in told))


def gossip(key: NodeKey, people: People, now_s: float = 100.0, incarnation: int = 1, seed: int = 0) -> Gossip:
    draw = random.Random(seed)
    own = OwnAdvert(key.node_id, lambda told: sign_advert(key, told), draw, now_s, incarnation)
    return Gossip(own, people.trust(), draw, now_s)


def sent(outcome: Outcome, kind: type[Message] | None = None, to: bytes | None = None) -> list[Message]:
    return [
        effect.message
        for effect in outcome.effects
        if isinstance(effect, SendTo)
        and (kind is None or isinstance(effect.message, kind))
        and to in (None, effect.node)
    ]


def kinds(outcome: Outcome) -> list[str]:
    return [event.kind for event in outcome.events]
