"""Questions to other nodes and their answers, matched by node and number."""

import asyncio
import functools
from collections.abc import Callable, Mapping

from potluck.core.errors import BadRequest, LinkClosed
from potluck.core.remembered import AnswerSoFar, unpacked_tokens
from potluck.wire.effects import SendTo
from potluck.wire.messages import (
    MAX_HISTORY,
    AnswerData,
    Described,
    Failed,
    GetAnswer,
    GetTokenizer,
    Message,
    TokenizerData,
)

_ANSWER_TIMEOUT_S = 5.0
TEXT_SIDE_TIMEOUT_S = 60.0  # manifest and tokenizer: megabytes in one piece, perhaps over a slow line
_RECALL_TIMEOUT_S = 0.5  # for all who are asked at once; a reader waits for it


def _account(answer: Message, body: bytes, most_tokens: int) -> AnswerSoFar | None:
    """None where it cannot be one; looked at before the tokens become numbers, which take ten times the room."""
    if not isinstance(answer, AnswerData) or len(body) % 4 or len(body) > 4 * most_tokens:
        return None
    account = AnswerSoFar(answer.prompt_length, unpacked_tokens(body))
    return account if 0 < account.prompt_length <= len(account.tokens) else None


class Questions:
    def __init__(self, send: Callable[[SendTo], None]) -> None:
        self._send = send
        self._answers: dict[tuple[bytes, int], asyncio.Future[tuple[Message, bytes]]] = {}
        self._nonce = 0

    def __repr__(self) -> str:
        return f"<Questions {len(self._answers)} without an answer>"

    def __len__(self) -> int:
        """How many wait for their answer."""
        return len(self._answers)

    async def ask(
        self, node: bytes, question: Callable[[int], Message], timeout_s: float = _ANSWER_TIMEOUT_S,
        address: str | None = None,
    ) -> tuple[Message, bytes]:  # fmt: skip
        """One request and its answer. Raises TimeoutError, LinkClosed; a Failed answer is raised as what it says.

        `address`: where the node is dialled if there is no link to it.
        """
        self._nonce += 1
        nonce = self._nonce
        future: asyncio.Future[tuple[Message, bytes]] = asyncio.get_running_loop().create_future()
        self._answers[node, nonce] = future
        try:
            self._send(SendTo(node, address, question(nonce)))
            answer, body = await asyncio.wait_for(future, timeout_s)
        finally:
            self._answers.pop((node, nonce), None)
        if isinstance(answer, Failed):
            raise BadRequest(f"{answer.code}: {answer.message}")
        return answer, body

    async def fetch_tokenizer(
        self, node: bytes, weights_sha256: str, address: str | None = None
    ) -> tuple[bytes, bytes]:
        """The manifest and the tokenizer of a model, as a shard has them; the caller checks them against the hash."""
        question = functools.partial(GetTokenizer, weights_sha256=weights_sha256)
        answer, body = await self.ask(node, question, TEXT_SIDE_TIMEOUT_S, address)
        if not isinstance(answer, TokenizerData) or answer.manifest_bytes + answer.tokenizer_bytes != len(body):
            raise BadRequest("a shard answered with something else than a tokenizer")
        return body[: answer.manifest_bytes], body[answer.manifest_bytes :]

    async def ask_for_answer(
        self, proofs: Mapping[bytes, bytes], most_tokens: int = MAX_HISTORY
    ) -> tuple[AnswerSoFar, ...]:
        """What any of them says about an answer; who does not answer soon is not waited for. A proof for each node."""
        if not proofs:
            return ()
        loop = asyncio.get_running_loop()
        questions = {node: functools.partial(GetAnswer, proof=proof) for node, proof in proofs.items()}
        asking = [loop.create_task(self.ask(node, question)) for node, question in questions.items()]
        try:
            done, _ = await asyncio.wait(asking, timeout=_RECALL_TIMEOUT_S)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        answers = [task.result() for task in done if task.exception() is None]
        accounts = (_account(answer, body, most_tokens) for answer, body in answers)
        return tuple(account for account in accounts if account is not None)

    def on_answer(self, sender: bytes, message: Described | TokenizerData | AnswerData | Failed, body: bytes) -> None:
        """Taken from whoever was asked, and from nobody else; what nobody waits for is dropped."""
        future = self._answers.get((sender, message.nonce))
        if future is not None and not future.done():
            future.set_result((message, body))

    def on_lost(self, node: bytes, reason: str) -> None:
        for (asked, _), answer in self._answers.items():
            if asked == node and not answer.done():
                answer.set_exception(LinkClosed(f"{node.hex()[:8]} was lost before it answered: {reason}"))
