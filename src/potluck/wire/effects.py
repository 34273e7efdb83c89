"""What the deciding parts want done on the network. No I/O: whoever drives them carries it out, in order."""

import msgspec

from potluck.wire.messages import Message


class SendTo(msgspec.Struct, frozen=True):
    """To a node; `address` where it can be dialled, None (or empty) for whoever has a link to us."""

    node: bytes
    address: str | None
    message: Message
    body: bytes = b""
