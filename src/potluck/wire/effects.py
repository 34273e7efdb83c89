"""What the deciding parts want done on the network. No I/O: whoever drives them carries it out, in order."""

from dataclasses import dataclass

from potluck.wire.messages import Message


@dataclass(frozen=True)
class SendTo:
    """To a node; `address` where it can be dialled, None (or empty) for whoever has a link to us."""

    node: bytes
    address: str | None
    message: Message
    body: bytes = b""
