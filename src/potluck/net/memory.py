"""A network inside one process: what a node uses to reach itself, and tests to make links slow, jumpy, cut off or dead.

Time is the loop's, chance comes from a seed, and nobody signs anything: a node is who its transport says. Frames are the real ones.
"""

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from potluck.core.errors import BadRequest, DialFailed, PeerRefused, PotluckError, WrongPeer
from potluck.identity.keys import short_id
from potluck.net.framed_link import CLOSE_TIMEOUT_S, FramedLink, State
from potluck.net.link import Admits, LinkHandler, admit_anyone
from potluck.wire.frames import HEADER, Buffer, Kind
from potluck.wire.handshake import Ticket

PIPE_BYTES = 2 << 20  # what one direction holds before its writer must wait, as a socket's buffers would


@dataclass(frozen=True)
class Route:
    """How frames travel: each takes `delay_s`, and up to `jitter_s` more, by which streams overtake each other."""

    delay_s: float = 0.0
    jitter_s: float = 0.0


class MemoryNetwork:
    """Nodes, addresses and links, and every fault that a test may want. Deterministic for a seed and a deterministic loop."""

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - delays, not secrets
        self._routes: dict[frozenset[bytes], Route] = {}
        self._parted: set[frozenset[bytes]] = set()
        self._frozen: set[bytes] = set()
        self._dead: set[bytes] = set()
        self._links: dict[MemoryLink, None] = {}  # a set that keeps its order, for the sake of determinism
        self._due: list[Callable[[], None]] = []  # what would have arrived, were its way not blocked
        self._ports = itertools.count(1)
        self.listeners: dict[str, MemoryListener] = {}

    def __repr__(self) -> str:
        return f"<MemoryNetwork {len(self.listeners)} listeners, {len(self._links)} ends of links, {len(self._dead)} nodes dead>"

    def transport(self, node: bytes, admits: Admits = admit_anyone) -> "MemoryTransport":
        return MemoryTransport(self, node, admits)

    def set_route(self, first: bytes, second: bytes, route: Route) -> None:
        """From now on; in both directions."""
        self._routes[frozenset((first, second))] = route

    def part(self, first: bytes, second: bytes) -> None:
        """Nothing passes between two nodes, and nobody is told; what is under way waits for `heal`."""
        self._parted.add(frozenset((first, second)))

    def heal(self, first: bytes, second: bytes) -> None:
        self._parted.discard(frozenset((first, second)))
        self._resume()

    def freeze(self, node: bytes) -> None:
        """Nothing reaches or leaves a node until `thaw`, as if its process had been stopped."""
        self._frozen.add(node)

    def thaw(self, node: bytes) -> None:
        self._frozen.discard(node)
        self._resume()

    def cut(self, first: bytes, second: bytes) -> None:
        """Both ends of every link between two nodes are lost; they may dial again at once."""
        for link in [link for link in self._links if {link.node, link.peer} == {first, second}]:
            link.reset()

    def kill(self, node: bytes) -> None:
        """A node's process dies: its links are lost to the others, and it hears nothing any more."""
        self._dead.add(node)
        for address in [address for address, listener in self.listeners.items() if listener.node == node]:
            del self.listeners[address]
        for link in [link for link in self._links if link.node == node]:
            link.abort()

    def revive(self, node: bytes) -> None:
        """The node may listen and dial again; its old links stay lost."""
        self._dead.discard(node)

    # ---------------------------------------------------------------- for links and transports

    def free_address(self, start: str) -> str:
        return f"{start}{next(self._ports)}"

    def is_dead(self, node: bytes) -> bool:
        return node in self._dead

    def pass_over(self, source: bytes, target: bytes, arrival: Callable[[], None]) -> None:
        """Call `arrival` after the delay from one node to another, and not while the way is blocked."""
        loop = asyncio.get_running_loop()
        delay_s = self._delay_s(source, target)
        if delay_s:
            loop.call_later(delay_s, self._arrive, source, target, arrival)
        else:
            loop.call_soon(self._arrive, source, target, arrival)

    def _delay_s(self, source: bytes, target: bytes) -> float:
        route = self._routes.get(frozenset((source, target)))
        if route is None:
            return 0.0
        return route.delay_s + (self._chance.uniform(0.0, route.jitter_s) if route.jitter_s else 0.0)

    def _arrive(self, source: bytes, target: bytes, arrival: Callable[[], None]) -> None:
        if source in self._frozen or target in self._frozen or frozenset((source, target)) in self._parted:
            self._due.append(lambda: self._arrive(source, target, arrival))
        else:
            arrival()

    def _resume(self) -> None:
        due, self._due = self._due, []
        for arrival in due:
            asyncio.get_running_loop().call_soon(arrival)

    def join(self, link: "MemoryLink") -> None:
        self._links[link] = None

    def leave(self, link: "MemoryLink") -> None:
        self._links.pop(link, None)


class _Pipe:
    """One direction of a link. Frames of one stream arrive in order; those of different streams as their delays have it."""

    def __init__(self, network: MemoryNetwork, sender: "MemoryLink", receiver: "MemoryLink") -> None:
        self._network = network
        self._sender = sender
        self._receiver = receiver
        self._streams: dict[int, deque[bytes]] = {}
        self._under_way_bytes = 0
        self._goodbye: bytes | None = None  # overtakes nothing

    @property
    def has_room(self) -> bool:
        return self._under_way_bytes < PIPE_BYTES

    def carry(self, frame: list[Buffer]) -> None:
        data = b"".join(frame)
        if data[0] == Kind.GOODBYE:
            self._goodbye = data
            if not self._streams:
                self._later(self._part)
            return
        stream = HEADER.unpack_from(data)[3]
        self._streams.setdefault(stream, deque()).append(data)
        self._under_way_bytes += len(data)
        self._later(lambda: self._arrive(stream))

    def cut(self) -> None:
        """As a reset: what is under way is lost, and the receiver learns of it in its time."""
        self._streams.clear()
        self._later(lambda: self._receiver.lose("connection reset"))

    def _later(self, arrival: Callable[[], None]) -> None:
        self._network.pass_over(self._sender.node, self._receiver.node, arrival)

    def _arrive(self, stream: int) -> None:
        frames = self._streams.get(stream)
        if not frames:  # cut meanwhile
            return
        data = frames.popleft()
        if not frames:
            del self._streams[stream]
        self._under_way_bytes -= len(data)
        self._receiver.deliver(data)
        if not self._streams:
            self._part()
        self._sender.resume_sending()

    def _part(self) -> None:
        if self._goodbye is not None:
            goodbye, self._goodbye = self._goodbye, None
            self._receiver.deliver(goodbye)


class MemoryLink(FramedLink):
    """One end of a link."""

    def __init__(self, network: MemoryNetwork, node: bytes, peer: bytes, handler: LinkHandler) -> None:
        super().__init__(handler, peer, State.OPEN)
        self.node = node
        self._network = network
        self._pipe: _Pipe | None = None
        self._timer: asyncio.TimerHandle | None = None
        network.join(self)

    def connect(self, other: "MemoryLink") -> None:
        self._pipe = _Pipe(self._network, self, other)

    def deliver(self, data: bytes) -> None:
        if self._state is State.CLOSED:
            return
        try:
            self._receive(data)
        except Exception:
            self._break("the handler failed")  # as asyncio does with a protocol that raises
            raise

    def lose(self, reason: str) -> None:
        if self._state is not State.CLOSED:
            self._lose(reason)

    def reset(self) -> None:
        self._break("connection reset")

    def resume_sending(self) -> None:
        if self._state is not State.CLOSED:
            self._flush()

    def _end(self, error: PotluckError) -> None:
        super()._end(error)
        self._network.leave(self)
        if self._timer is not None:
            self._timer.cancel()

    def _flush(self) -> None:
        pipe, writer = self._pipe, self._channel.writer
        if pipe is None or self._state is State.CLOSED:
            return
        while pipe.has_room and (frame := writer.take_frame()):
            pipe.carry(frame)

    def _disconnect(self) -> None:
        if self._pipe is not None:
            self._pipe.cut()

    def _leave(self) -> None:
        self._disconnect()

    def _start_closing(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self.abort)


class MemoryListener:
    def __init__(self, network: MemoryNetwork, address: str, node: bytes, admits: Admits, handler: LinkHandler) -> None:
        self.address = address
        self.node = node
        self._network = network
        self._admits = admits
        self._handler = handler

    def __repr__(self) -> str:
        return f"<MemoryListener {self.address} of {short_id(self.node)}>"

    def close(self) -> None:
        self._network.listeners.pop(self.address, None)

    def accept(self, dialer: MemoryLink, ticket: Ticket | None) -> None:
        """Connect a dialer's end to a new one of ours. Raises PeerRefused."""
        presented = None if ticket is None else ticket.present(self.node + dialer.node)
        refusal = self._admits(dialer.node, presented)
        if refusal is not None:
            raise PeerRefused(refusal)
        ours = MemoryLink(self._network, self.node, dialer.node, self._handler)
        ours.connect(dialer)
        dialer.peer = self.node
        dialer.connect(ours)


class MemoryTransport:
    """Makes links for one node. Addresses are any text; ":0" at the end asks for one of its own."""

    def __init__(self, network: MemoryNetwork, node: bytes, admits: Admits) -> None:
        self._network = network
        self._node = node
        self._admits = admits

    def __repr__(self) -> str:
        return f"<MemoryTransport {short_id(self._node)}>"

    async def dial(
        self, address: str, node: bytes | None, handler: LinkHandler, timeout_s: float, ticket: Ticket | None = None
    ) -> MemoryLink:
        """See Transport.dial."""
        link = MemoryLink(self._network, self._node, b"", handler)
        try:
            async with asyncio.timeout(timeout_s):
                await self._connect(address, node, link, ticket)
        except TimeoutError as error:
            link.abort()
            raise DialFailed(f"{address} did not answer within {timeout_s:g} s") from error
        except BaseException:
            link.abort()
            raise
        return link

    async def _connect(self, address: str, node: bytes | None, link: MemoryLink, ticket: Ticket | None) -> None:
        listener = self._network.listeners.get(address)
        if listener is None or self._network.is_dead(self._node):
            raise DialFailed(f"cannot reach {address}: nobody listens there")
        await self._travel(self._node, listener.node)
        if self._network.listeners.get(address) is not listener:
            raise DialFailed(f"cannot reach {address}: nobody listens there any more")
        if node not in (None, listener.node):
            raise WrongPeer(f"expected node {short_id(node or b'')}, found {short_id(listener.node)}")
        listener.accept(link, ticket)
        await self._travel(listener.node, self._node)

    async def _travel(self, source: bytes, target: bytes) -> None:
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._network.pass_over(source, target, lambda: None if arrived.done() else arrived.set_result(None))
        await arrived

    async def listen(self, address: str, handler: LinkHandler) -> MemoryListener:
        """See Transport.listen."""
        if address.endswith(":0"):
            address = self._network.free_address(address.removesuffix("0"))
        if address in self._network.listeners:
            raise BadRequest(f"cannot listen on {address}: somebody does already")
        listener = MemoryListener(self._network, address, self._node, self._admits, handler)
        self._network.listeners[address] = listener
        return listener
