"""Shards that were named by address: found, looked for again when they are lost, and asked now and then how busy they are."""

import asyncio
from collections.abc import Callable, Sequence

from potluck.core.errors import PotluckError, ShardUnavailable
from potluck.net.peers import PeerLinks
from potluck.orchestrator.questions import Questions
from potluck.orchestrator.routing import ShardStore
from potluck.wire.messages import Describe, Described

_RETRY_S = 0.5
_REFRESH_S = 2.0  # between questions how busy those are that were named by address


class Addresses:
    """Puts into `store` what they serve; tells `on_returned` who is back."""

    def __init__(
        self, links: PeerLinks, questions: Questions, store: ShardStore, on_returned: Callable[[bytes], None]
    ) -> None:
        self._links, self._questions, self._store, self._returned = links, questions, store, on_returned
        self._addresses: dict[str, bytes | None] = {}
        self._looking: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Addresses {list(self._addresses)}>"

    async def connect(self, addresses: Sequence[str]) -> list[Described]:
        """Links to these addresses and asks what they serve. Those that cannot be reached are tried again later."""
        answers = await asyncio.gather(*(self._try(address) for address in addresses))
        if not self._looking:
            loop = asyncio.get_running_loop()
            self._looking = [loop.create_task(self._retry()), loop.create_task(self._keep_fresh())]
        found = [answer for answer in answers if answer is not None]
        if not found:
            raise ShardUnavailable(f"none of {', '.join(addresses)} can be reached")
        return found

    async def _try(self, address: str) -> Described | None:
        self._addresses.setdefault(address, None)
        try:
            node = await self._links.connect(address)
            answer, _ = await self._questions.ask(node, Describe)
        except (PotluckError, OSError, TimeoutError):
            return None
        if not isinstance(answer, Described) or answer.node != node:
            return None
        self._addresses[address] = node
        self._store.put(node, address, answer)
        return answer

    async def _retry(self) -> None:
        """Looks for nodes that were lost, so that a pipeline that waits for one goes on when it is back."""
        while True:
            await asyncio.sleep(_RETRY_S)
            for address, node in list(self._addresses.items()):
                if node is None or not self._links.is_linked(node):
                    answer = await self._try(address)
                    if answer is not None:
                        self._returned(answer.node)

    async def _keep_fresh(self) -> None:
        """Who is full, and how long queues are, was true when they said so. (In a swarm adverts tell it.)"""
        while True:
            await asyncio.sleep(_REFRESH_S)
            known = [(address, node) for address, node in self._addresses.items() if node is not None]
            await asyncio.gather(*(self._refresh(address, node) for address, node in known))

    async def _refresh(self, address: str, node: bytes) -> None:
        if not self._links.is_linked(node):
            return
        try:
            answer, _ = await self._questions.ask(node, Describe)
        except (PotluckError, TimeoutError):
            return  # whoever uses it will find out
        is_on_offer = self._store.offer_of(node) is not None
        if is_on_offer and isinstance(answer, Described) and answer.node == node:
            self._store.put(node, address, answer)

    async def close(self) -> None:
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
