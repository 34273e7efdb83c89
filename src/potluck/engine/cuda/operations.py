"""What a decoder is made of, as an interface; and its plain form in torch, which runs on any device and is the kernels' judge."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from potluck.core.model_facts import Activation
from potluck.engine.cuda.batches import AttentionFacts, Batch, ChunkBatch
from potluck.engine.cuda.matrices import Matrix
from potluck.engine.kv_format import LARGEST_HALF, PAGE_POSITIONS


@dataclass(frozen=True)
class Unscaled:
    """Rows times the weight of the norm that comes next, not yet divided by their root mean square; for tensor cores."""

    rows: torch.Tensor
    squares: torch.Tensor  # (pieces, padded rows) of float32: a row's sum of squares, in pieces


class Operations(Protocol):
    def products(
        self, matrices: Sequence[Matrix], x: torch.Tensor, *, norm: torch.Tensor | None, epsilon: float,
        bias: torch.Tensor | None, is_exact: bool = False, unscaled: Unscaled | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Rows of x, normalised where there is a norm, times each matrix, side by side. `is_exact`: the result is float32.

        Without a norm x comes from `attend` or `gated`, made for this one matrix. `unscaled`: what `add_product` gave for this norm.
        """
        ...

    def add_product(
        self, matrix: Matrix, x: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor | None, next_norm: torch.Tensor | None
    ) -> Unscaled | None:  # fmt: skip
        """hidden += x · matrix + bias, in place. Where it costs nothing, half of what `next_norm` will do to hidden is done too."""
        ...

    def gated(
        self, matrices: Sequence[Matrix], x: torch.Tensor, norm: torch.Tensor, epsilon: float, activation: Activation,
        following: Matrix, unscaled: Unscaled | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """activation(gate) · up of normalised rows; `matrices`: both in one, or gate and up.

        The result is for a product with `following` and may lie in an order that only that product knows; likewise `attend`'s.
        """
        ...

    def add_normed(self, hidden: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, epsilon: float) -> None:
        """hidden += norm(x), in place."""
        ...

    def attend(self, incoming: torch.Tensor, batch: Batch, facts: AttentionFacts, following: Matrix) -> torch.Tensor:
        """Queries, keys and values side by side: stores the new keys and values, returns what the queries see."""
        ...

    def capped(self, logits: torch.Tensor, cap: float) -> torch.Tensor: ...

    def transfer(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies a few kilobytes; one side may be pinned memory of the host. Both are contiguous."""
        ...

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Per row the largest logit's lowest id as int32; -1 where one is not a number."""
        ...


class PlainOperations:
    """float32 throughout, matrices dequantised where they are used."""

    def products(
        self, matrices: Sequence[Matrix], x: torch.Tensor, *, norm: torch.Tensor | None, epsilon: float,
        bias: torch.Tensor | None, is_exact: bool = False, unscaled: Unscaled | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows = x.float() if norm is None else rms_norm(x, norm, epsilon)
        result = torch.cat([_times(rows, matrix) for matrix in matrices], dim=1)
        return result if bias is None else result + bias

    def add_product(
        self, matrix: Matrix, x: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor | None, next_norm: torch.Tensor | None
    ) -> Unscaled | None:  # fmt: skip
        hidden += self.products([matrix], x, norm=None, epsilon=0.0, bias=bias)
        return None

    def gated(
        self, matrices: Sequence[Matrix], x: torch.Tensor, norm: torch.Tensor, epsilon: float, activation: Activation,
        following: Matrix, unscaled: Unscaled | None = None,
    ) -> torch.Tensor:  # fmt: skip
        gate, up = self.products(matrices, x, norm=norm, epsilon=epsilon, bias=None).chunk(2, dim=1)
        return activated(gate, activation) * up

    def add_normed(self, hidden: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, epsilon: float) -> None:
        hidden += rms_norm(x, norm, epsilon)

    def capped(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        return cap * torch.tanh(logits / cap)

    def transfer(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        best = logits.argmax(dim=1).to(torch.int32)
        return torch.where(logits.isnan().any(dim=1), torch.full_like(best, -1), best)

    def attend(self, incoming: torch.Tensor, batch: Batch, facts: AttentionFacts, following: Matrix) -> torch.Tensor:
        if isinstance(batch, ChunkBatch):
            return _attend_session(incoming, batch.start, batch.table_row, facts)
        result = torch.zeros(len(incoming), facts.heads * facts.head_size, device=incoming.device)
        for row, (position, table_row) in enumerate(
            zip(batch.positions.tolist(), batch.table_rows.tolist(), strict=True)
        ):
            if position >= 0:
                result[row] = _attend_session(incoming[row : row + 1], position, table_row, facts)[0]
        return result


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * weight


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")


def _times(rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return rows @ matrix.floats().T


def rotate(x: torch.Tensor, start: int, facts: AttentionFacts) -> torch.Tensor:
    """x: (tokens, heads, size), at positions from `start` on."""
    half = facts.rotary_dimensions // 2
    cos = facts.cos[start : start + len(x), None]
    sin = facts.sin[start : start + len(x), None]
    turned, rotated = x.clone(), x[..., : 2 * half]
    if facts.is_interleaved:
        left, right = rotated[..., 0::2], rotated[..., 1::2]
        turned[..., 0 : 2 * half : 2], turned[..., 1 : 2 * half : 2] = (
            left * cos - right * sin,
            left * sin + right * cos,
        )
    else:
        left, right = rotated[..., :half], rotated[..., half:]
        turned[..., :half], turned[..., half : 2 * half] = left * cos - right * sin, left * sin + right * cos
    return turned


def _attend_session(incoming: torch.Tensor, start: int, table_row: int, facts: AttentionFacts) -> torch.Tensor:
    query, key, value = _heads(incoming, start, facts)
    stop = start + len(incoming)
    slots = facts.tables[table_row, : -(-stop // PAGE_POSITIONS)].long()
    places = torch.arange(start, stop, device=incoming.device)
    at = slots[places // PAGE_POSITIONS], slice(None), places % PAGE_POSITIONS
    facts.keys[at], facts.values[at] = stored(key, facts.keys), stored(value, facts.values)
    keys, values = (pool[slots].transpose(1, 2).flatten(0, 1)[:stop].float() for pool in (facts.keys, facts.values))
    group = facts.heads // facts.kv_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query * facts.scale, keys)
    if facts.soft_cap is not None:
        scores = facts.soft_cap * torch.tanh(scores / facts.soft_cap)
    behind = places[:, None] - torch.arange(stop, device=incoming.device)[None, :]
    is_hidden = behind < 0 if facts.window is None else (behind < 0) | (behind >= facts.window)
    scores = scores.masked_fill(is_hidden[None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values).flatten(1)


def _heads(
    incoming: torch.Tensor, start: int, facts: AttentionFacts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values by heads; normalised and rotated."""
    wide, narrow = facts.heads * facts.head_size, facts.kv_heads * facts.head_size
    parts = torch.split(incoming.float(), [wide, narrow, narrow], dim=1)
    query, key, value = (part.reshape(len(part), -1, facts.head_size) for part in parts)
    if facts.query_norm is not None and facts.key_norm is not None:
        query, key = rms_norm(query, facts.query_norm, facts.epsilon), rms_norm(key, facts.key_norm, facts.epsilon)
    return rotate(query, start, facts), rotate(key, start, facts), value


def stored(x: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    return x.clamp(-LARGEST_HALF, LARGEST_HALF).half() if pool.dtype == torch.float16 else x
