"""What a shard's core wants done: messages, work for the worker, whom to avoid, what to remember.

In order; whoever drives the core carries it out. Knows nothing of why.
"""

import msgspec

from potluck.core.remembered import AnswerSoFar
from potluck.shard.sessions import ShardSession
from potluck.wire.effects import SendTo
from potluck.wire.messages import Fault, Message
from potluck.wire.work import ToWorker


class Work(msgspec.Struct, frozen=True):
    message: ToWorker
    body: bytes = b""


class Suspect(msgspec.Struct, frozen=True):
    """A head says that this node was lost from its pipeline: whoever routes should prefer others for a while."""

    node: bytes
    reason: str


class Remember(msgspec.Struct, frozen=True):
    """A head was lost in the middle of an answer that its reader may take up elsewhere."""

    key: bytes
    answer: AnswerSoFar


Effect = SendTo | Work | Suspect | Remember


class Effects:
    """The core's parts write here, so that the order is the one in which things were decided."""

    def __init__(self) -> None:
        self.items: list[Effect] = []

    def __repr__(self) -> str:
        return f"<Effects {len(self.items)}>"

    def send(self, node: bytes, address: str | None, message: Message, body: bytes = b"") -> None:
        self.items.append(SendTo(node, address, message, body))

    def work(self, message: ToWorker, body: bytes = b"") -> None:
        self.items.append(Work(message, body))

    def fault(self, session: ShardSession, code: str, text: str, culprit: bytes | None) -> None:
        self.send(session.head, None, Fault(session.id, session.epoch, code, text, culprit))
