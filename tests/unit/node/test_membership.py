"""Nodes of one swarm: joining by invite, what an expelled one loses, who may ask. In memory, on files in a folder of the test's."""

import asyncio
from pathlib import Path

import pytest

from potluck.core.errors import NotEntitled, PeerRefused, ShardUnavailable
from potluck.core.remembered import Accounts, AnswerSoFar, answer_proof, resume_key
from potluck.identity.keys import NodeKey
from potluck.net.memory import MemoryNetwork
from potluck.node.answering import NodeAnswering
from potluck.node.node import Node
from potluck.trust.admission import Admission
from potluck.trust.keeper import SwarmKeeper
from potluck.trust.records import Trust
from potluck.trust.swarm_file import SwarmFile
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    Described,
    Failed,
    GetAnswer,
    GetChunk,
    GetHoldings,
    GetTokenizer,
    Message,
    Refused,
    ShardInfo,
    Stage,
)
from tests.support.link_ends import run_test
from tests.support.wire_messages import describe, opening

FOUNDER, GUEST, THIRD = (NodeKey.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
NOW_S = 1_800_000_000.0


def member_node(network: MemoryNetwork, key: NodeKey, keeper: SwarmKeeper) -> Node:
    admission = Admission(keeper, lambda: NOW_S)
    return Node(key, network.transport(key.node_id, admission), admission)


async def join(
    network: MemoryNetwork, key: NodeKey, founder: SwarmKeeper, address: str, trust: Trust, folder: Path
) -> Node:
    invite = founder.invite(trust, 1, int(NOW_S) + 60, (), NOW_S)
    keeper = SwarmKeeper.join(key, SwarmFile(folder / f"{key.node_id[0]}.swarm"), invite)
    node = member_node(network, key, keeper)
    await node.links.connect(address, invite.issuer, invite.ticket)
    keeper.take_all(founder.roster.records())  # what gossip would do
    return node


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def test_an_expelled_member_loses_its_links_at_once_and_everywhere(tmp_path: Path) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        keeper = SwarmKeeper.found(FOUNDER, SwarmFile(tmp_path / "founder.swarm"))
        founder = member_node(network, FOUNDER, keeper)
        address = await founder.listen("memory:0")
        guest = await join(network, GUEST, keeper, address, Trust.MEMBER, tmp_path)
        third = await join(network, THIRD, keeper, address, Trust.MEMBER, tmp_path)
        third_address = await third.listen("memory:0")
        assert third._admission
        assert guest._admission
        guest._admission.keeper.take_all(keeper.roster.records())
        await guest.links.connect(third_address)
        guest._send(SendTo(FOUNDER.node_id, None, describe()))
        guest._send(SendTo(THIRD.node_id, None, describe()))
        await settle()
        assert founder.links.is_linked(GUEST.node_id)
        records = keeper.expel(GUEST.node_id)
        assert not founder.links.is_linked(GUEST.node_id)
        third._admission.keeper.take_all(records)
        assert not third.links.is_linked(GUEST.node_id)
        await settle()
        assert not guest.links.is_linked(FOUNDER.node_id)
        for door in (address, third_address):
            with pytest.raises(PeerRefused) as caught:
                await guest.links.connect(door)
            assert caught.value.reason == "expelled"
        page = founder.metrics_page().decode()
        assert 'distributed_inference_dropped_messages_total{reason="expelled"} 1.0' in page
        for node in (guest, third, founder):
            await node.stop()
        again = SwarmKeeper(THIRD, SwarmFile(tmp_path / f"{THIRD.node_id[0]}.swarm"))
        assert again.roster.is_expelled(GUEST.node_id)

    run_test(main())


def test_who_is_merely_invited_may_not_ask(tmp_path: Path) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        keeper = SwarmKeeper.found(FOUNDER, SwarmFile(tmp_path / "founder.swarm"))
        founder = member_node(network, FOUNDER, keeper)
        guest = await join(network, GUEST, keeper, await founder.listen("memory:0"), Trust.INVITED, tmp_path)
        answers: list[Message] = []
        guest.links._on_message = lambda node, message, body: answers.append(message)
        guest._send(SendTo(FOUNDER.node_id, None, opening()))
        await settle()
        assert isinstance(answers[0], Refused)
        assert answers[0].code == "not_entitled"
        assert founder.counters["may_not_ask"] == 1
        advice = f"potluck trust {GUEST.node_id.hex()[:8]} --trust member"
        with pytest.raises(NotEntitled, match=advice):  # at once, instead of trying every shard in vain
            await NodeAnswering(guest).open(None)
        with pytest.raises(ShardUnavailable, match="may be loading"):
            await NodeAnswering(founder).open(None)
        for node in (guest, founder):
            await node.stop()

    run_test(main())


def test_a_node_without_layers_refuses_a_session_instead_of_seeming_dead(tmp_path: Path) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        keeper = SwarmKeeper.found(FOUNDER, SwarmFile(tmp_path / "founder.swarm"))
        founder = member_node(network, FOUNDER, keeper)
        guest = await join(network, GUEST, keeper, await founder.listen("memory:0"), Trust.MEMBER, tmp_path)
        answers: list[Message] = []
        guest.links._on_message = lambda node, message, body: answers.append(message)
        guest._send(SendTo(FOUNDER.node_id, None, opening()))
        await settle()
        assert [(type(answer), getattr(answer, "code", "")) for answer in answers] == [(Refused, "shard_unavailable")]
        for node in (guest, founder):
            await node.stop()

    run_test(main())


def test_an_expelled_member_hears_who_expelled_it(tmp_path: Path) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        keeper = SwarmKeeper.found(FOUNDER, SwarmFile(tmp_path / "founder.swarm"))
        founder = member_node(network, FOUNDER, keeper)
        guest = await join(network, GUEST, keeper, await founder.listen("memory:0"), Trust.TRUSTED, tmp_path)
        guest._send(SendTo(FOUNDER.node_id, None, describe()))
        await settle()
        assert guest._admission
        own = guest._admission.keeper
        guest.on_swarm_message = lambda node, message: own.take_all(aged.record for aged in message.records)  # type: ignore[union-attr]
        assert guest.may_ask
        keeper.expel(GUEST.node_id)
        await settle()
        assert own.roster.expelled_by(GUEST.node_id) == FOUNDER.node_id
        assert not guest.may_ask
        for node in (guest, founder):
            await node.stop()

    run_test(main())


class SilentLink:
    """The end of a link that keeps what is sent."""

    queued_bytes = 0

    def __init__(self, peer: bytes) -> None:
        self.peer, self.sent = peer, list[Message]()

    def send(self, message: Message, body: bytes = b"", *, is_more: bool = False) -> None:
        self.sent.append(message)


@pytest.mark.parametrize(
    ("trust", "chunk", "tokenizer"),
    [
        (Trust.INVITED, "not_entitled", "not_entitled"),
        (Trust.MEMBER, "not_entitled", "model_not_found"),
        (Trust.TRUSTED, "model_not_found", "model_not_found"),
    ],
)
def test_weights_are_given_to_those_who_may_serve_and_tokenizers_to_those_who_may_ask(
    tmp_path: Path, trust: Trust, chunk: str, tokenizer: str
) -> None:
    async def main() -> None:
        keeper = SwarmKeeper.found(FOUNDER, SwarmFile(tmp_path / "founder.swarm"))
        founder, link = member_node(MemoryNetwork(), FOUNDER, keeper), SilentLink(GUEST.node_id)
        keeper.admit(GUEST.node_id, trust)
        for request in (GetChunk(1, "5" * 64, "tensor", 0), GetHoldings(2, "5" * 64), GetTokenizer(3, "5" * 64)):
            founder.weights.on_message(link, request, b"")  # type: ignore[arg-type]
            await settle()
        codes = [answer.code for answer in link.sent if isinstance(answer, Failed)]
        assert codes == [chunk, chunk, tokenizer]
        answer = founder._tokenizer(GUEST.node_id, GetTokenizer(4, "5" * 64)).message
        assert isinstance(answer, Failed)
        assert answer.code == tokenizer
        assert founder.weights.counters["may_not_fetch"] == codes.count("not_entitled")
        await founder.stop()

    run_test(main())


@pytest.mark.parametrize(
    ("trust", "secret", "expected"),
    [
        (Trust.INVITED, b"s" * 16, "not_entitled"),
        (Trust.MEMBER, b"s" * 16, "5, 6, 7"),
        (Trust.MEMBER, b"x" * 16, "resume_impossible"),
    ],
)
def test_the_tokens_of_an_answer_are_given_to_members_who_have_its_secret(
    tmp_path: Path, trust: Trust, secret: bytes, expected: str
) -> None:
    async def main() -> None:
        network = MemoryNetwork()
        keeper = SwarmKeeper.found(FOUNDER, SwarmFile(tmp_path / "founder.swarm"))
        founder = member_node(network, FOUNDER, keeper)
        guest = await join(network, GUEST, keeper, await founder.listen("memory:0"), trust, tmp_path)
        guest._send(SendTo(FOUNDER.node_id, None, describe()))
        await settle()
        founder.orchestrator.on_ended(resume_key(b"s" * 16), AnswerSoFar(1, (5, 6, 7)))
        question = GetAnswer(4, answer_proof(resume_key(secret), GUEST.node_id, FOUNDER.node_id))
        answer = founder._answer_so_far(GUEST.node_id, question).message
        assert expected == (answer.code if isinstance(answer, Failed) else "5, 6, 7")
        assert await guest.recall(secret, "5" * 64) == Accounts()  # who does not serve the model is not asked
        info = ShardInfo("m", "5" * 64, 1, 2, Stage(0, 2, True, True), True, 4, 0, 0, 10)
        guest.orchestrator.store.put(FOUNDER.node_id, "f:1", Described(0, FOUNDER.node_id, "1", (info,), 1, ()))
        told = await guest.recall(secret, "5" * 64)
        assert told == Accounts(None, (AnswerSoFar(1, (5, 6, 7)),) if expected == "5, 6, 7" else ())
        assert await guest.recall(secret, "5" * 64, most_tokens=2) == Accounts()
        assert await founder.recall(b"s" * 16, "5" * 64) == Accounts(AnswerSoFar(1, (5, 6, 7)))
        overheard = founder._answer_so_far(FOUNDER.node_id, question).message  # a proof is its asker's alone
        assert isinstance(overheard, Failed)
        assert overheard.code == "resume_impossible"
        for node in (guest, founder):
            await node.stop()

    run_test(main())
