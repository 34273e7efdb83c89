"""A model whose arithmetic is hashing: any lost, doubled, stale or misrouted activation changes every token that follows.

Each layer hashes its input with a chain over all inputs it has seen; a row of activations is one 64-bit hash. A lossy codec cuts bits
off the row, so that a boundary that is rounded twice, or not at all, shows as well.
"""

from collections.abc import Sequence
from typing import NamedTuple

from potluck.wire.messages import Boundary, Sampler, Stage
from potluck.wire.prompt_scores import TokenScore, encode_scores
from potluck.wire.work import WorkItem, WorkOutput

ROW_BYTES = 8
VOCABULARY = 5000
_MASK = (1 << 64) - 1
_CLASSES = 4
_CUT = {"fp32": 0, "fp16": 8, "int8": 24}


def mix(*parts: int) -> int:
    value = 0x9E3779B97F4A7C15
    for part in parts:
        value = ((value ^ part) * 0xBF58476D1CE4E5B9) & _MASK
        value ^= value >> 29
        value = (value * 0x94D049BB133111EB) & _MASK
        value ^= value >> 32
    return value


def row_bytes(codec: str, rows: int, width: int) -> int:
    return ROW_BYTES * rows


def rounded(codec: str, row: int) -> int:
    return row >> _CUT[codec] << _CUT[codec]


class HashSession:
    """Keys and values are a chain per layer: chain[layer][p] covers positions 0 … p."""

    def __init__(self, stage: Stage, boundaries: tuple[Boundary, ...], sampler: Sampler | None) -> None:
        self.stage, self.sampler = stage, sampler
        self.codecs = {boundary.layer: boundary.codec for boundary in boundaries}
        self.chains: dict[int, list[int]] = {layer: [] for layer in range(stage.start, stage.stop)}
        self.length = 0
        self.history = list(sampler.history) if sampler is not None else []

    def resume(self, parent: "HashSession", length: int) -> None:
        self.chains = {layer: chain[:length] for layer, chain in parent.chains.items()}
        self.length = length

    def truncate(self, length: int, sampler: Sampler | None) -> None:
        self.length = length
        for chain in self.chains.values():
            del chain[length:]
        if sampler is not None:
            self.sampler, self.history = sampler, list(sampler.history)
        else:
            del self.history[length + 1 :]

    def forward(self, value: int) -> int:
        for layer in range(self.stage.start, self.stage.stop):
            if layer in self.codecs and layer != self.stage.start:
                value = rounded(self.codecs[layer], value)
            chain = self.chains[layer]
            chain.append(mix(layer, value, chain[-1] if chain else 1))
            value = mix(value, chain[-1])
        self.length += 1
        return value

    def choose(self, value: int, position: int) -> int:
        assert self.sampler is not None
        seen = mix(*self.history[-3:], len(self.history))
        token = mix(value, position, seen, self.sampler.params.seed) % VOCABULARY
        if self.sampler.grammar is not None:
            token -= token % _CLASSES - self._allowed(position)
        del self.history[position:]
        self.history.append(token)
        return token

    def _allowed(self, position: int) -> int:
        """A grammar allows one class of tokens at each place, which depends on all that was generated before."""
        assert self.sampler is not None
        return mix(*self.history[self.sampler.prompt_length : position]) % _CLASSES

    def score(self, position: int, rows: Sequence[int]) -> bytes:
        """Of the prompt's tokens after `position`, each by the row before it."""
        assert self.sampler is not None
        assert self.sampler.prompt_logprobs is not None
        top = self.sampler.prompt_logprobs
        following = self.history[position + 1 : self.sampler.prompt_length]
        return encode_scores([score_of(row, token, top) for row, token in zip(rows, following, strict=False)], top)


def score_of(row: int, token: int, top: int) -> TokenScore:
    alternatives = tuple((mix(row, place) % VOCABULARY, -float(mix(row, place) >> 40)) for place in range(top))
    return TokenScore(-float(mix(row, token) >> 40), mix(row, token) % 2 == 0, alternatives)


def run_item(session: HashSession, item: WorkItem, body: bytes) -> tuple[WorkOutput, bytes]:
    """One step, as a worker would do it."""
    if item.position != session.length:
        return WorkOutput(item.session, 0, None, None, (), "bad_request", "wrong position"), b""
    size = 4 if item.codec is None else ROW_BYTES
    rows = []
    for start in range(0, len(body), size):
        value = int.from_bytes(body[start : start + size], "little")
        rows.append(session.forward(mix(value) if item.codec is None else value))
    token = session.choose(rows[-1], session.length) if item.chooses else None
    output = session.score(item.position, rows) if item.scores_prompt else b""
    if item.output_codec is not None:
        output = b"".join(rounded(item.output_codec, row).to_bytes(ROW_BYTES, "little") for row in rows)
    return WorkOutput(item.session, len(output), token, None, (), "", ""), output


class Undisturbed(NamedTuple):
    """What one shard that holds everything gives when nothing goes wrong; `scores` None where nobody asked for them."""

    tokens: list[int]
    scores: list[TokenScore] | None


def undisturbed(
    prompt: tuple[int, ...], layers: int, count: int, sampler: Sampler, boundaries: tuple[Boundary, ...],
    eos: tuple[int, ...],
) -> Undisturbed:  # fmt: skip
    session = HashSession(Stage(0, layers, True, True), boundaries, sampler)
    rows = [session.forward(mix(token)) for token in prompt]
    top = sampler.prompt_logprobs
    scores = None if top is None else [score_of(row, token, top) for row, token in zip(rows, prompt[1:], strict=False)]
    value, tokens = rows[-1], list[int]()
    while len(tokens) < count:
        tokens.append(session.choose(value, session.length))
        if tokens[-1] in eos:
            break
        value = session.forward(mix(tokens[-1]))
    return Undisturbed(tokens, scores)
