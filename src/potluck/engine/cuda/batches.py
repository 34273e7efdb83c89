"""What one run through the layers works on: rows of different sessions, one token each, or a chunk of one session's tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowBatch:
    """One token of each of several sessions. Rows past the last session have the position -1 and are left alone."""

    positions: torch.Tensor  # int32 (rows,)
    table_rows: torch.Tensor  # int32 (rows,): each session's row of the page tables
    splits: int  # how many spans of positions attention is cut into, at most


@dataclass(frozen=True)
class ChunkBatch:
    """`count` consecutive tokens of one session, the first at `start`."""

    start: int
    count: int
    table_row: int


Batch = RowBatch | ChunkBatch


@dataclass(frozen=True)
class AttentionFacts:
    """One layer's attention, as kernels need it."""

    heads: int
    kv_heads: int
    head_size: int
    scale: float
    soft_cap: float | None
    window: int | None
    epsilon: float
    rotary_dimensions: int
    is_interleaved: bool
    cos: torch.Tensor  # (positions, pairs)
    sin: torch.Tensor
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    keys: torch.Tensor  # this layer's part of the pool: (slots, heads, 64, size)
    values: torch.Tensor
    tables: torch.Tensor
