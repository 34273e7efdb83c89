"""The interfaces of the network: links that carry messages, transports that make them. No implementation, no I/O.

A link is one authenticated connection, shared by many sessions. Handlers are called from the loop and must not block. Every link
that opened is reported lost exactly once, unless its own side closed it; one that never opened is not reported at all.
"""

from collections.abc import Callable
from typing import Protocol

from potluck.wire.foreseen import ForeseenStep
from potluck.wire.handshake import PresentedTicket, Ticket
from potluck.wire.messages import Message

Admits = Callable[[bytes, PresentedTicket | None], str | None]
"""Told a node id that was proven, and its ticket if it has one; answers None (welcome) or why not, which that node gets to see."""


def admit_anyone(node: bytes, ticket: PresentedTicket | None) -> None:
    """For nodes that belong to no swarm: whoever reaches their address is welcome."""


class Link(Protocol):
    """One authenticated connection."""

    @property
    def peer(self) -> bytes:
        """The other side's node id."""

    @property
    def queued_bytes(self) -> int:
        """What waits to be sent."""

    def send(self, message: Message, body: bytes | memoryview = b"", *, is_more: bool = False) -> None:
        """Queue a message; never blocks. A body must not change afterwards. `is_more`: it waits for the next one, which follows at once.

        Order is kept within a session; small messages overtake other sessions' large ones. Raises LinkClosed, LinkFull, WireMisuse.
        """

    def send_foreseen(self, step: ForeseenStep, spent: bytes, body: bytes) -> None:
        """As `send`, with a step whose frame was made beforehand."""

    def foresee(self, step: ForeseenStep, on_arrival: Callable[[bytes], None]) -> None:
        """Where exactly this step is what arrives next, and arrives alone, `on_arrival` is told its body before anything is decoded.

        The handler gets it after that, like any message. Whatever arrives, the step is not expected any more; nor if another one is.
        """

    def hold(self, session: bytes) -> None:
        """Stop the other side from sending more bulk for a session than is under way; small messages still come."""

    def release(self, session: bytes) -> None:
        """End a hold."""

    def close(self) -> None:
        """Send what is queued, then close. No callback comes after this. May be called again."""

    def abort(self) -> None:
        """Close at once; what is queued is lost."""


class LinkHandler(Protocol):
    """Whoever gets what arrives on links. The first message may come before `dial` has returned."""

    def on_message(self, link: Link, message: Message, body: bytes) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None: ...


class Listener(Protocol):
    @property
    def address(self) -> str:
        """Where it can be reached, with the port that was actually bound."""

    def close(self) -> None:
        """Accept no more. Links that opened stay."""


class Transport(Protocol):
    """Makes links, in both directions, for one node."""

    async def dial(
        self, address: str, node: bytes | None, handler: LinkHandler, timeout_s: float, ticket: Ticket | None = None
    ) -> Link:
        """A link to a node. `node` None: whoever answers is accepted, and found in `link.peer`. `ticket`: an invite to redeem there.

        Raises DialFailed, WrongPeer, PeerRefused, or ProtocolViolation when something else than a node answers.
        """

    async def listen(self, address: str, handler: LinkHandler) -> Listener:
        """Accept links at an address ("host:port"; port 0: any). Raises BadRequest for one that cannot be bound."""
