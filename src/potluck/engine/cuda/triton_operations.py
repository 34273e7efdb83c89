"""Operations by Triton kernels. The number of rows decides: one row, few rows (tensor cores), many (the matrix library).

Norms happen inside products: of one row where its product begins; of few rows half where the sum before ends, half where the product does.

`is_batch_invariant` leaves the one-row kernels out, so that a row takes the same way whatever shares its batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from potluck.core.model_facts import Activation
from potluck.engine.cuda.batches import AttentionFacts, Batch, ChunkBatch, RowBatch
from potluck.engine.cuda.kernels import attention, block_row, blocks, dense_row, products, quantise, rows
from potluck.engine.cuda.matrices import SCALE_KINDS, BlockMatrix, DenseMatrix, Matrix
from potluck.engine.cuda.operations import PlainOperations, Unscaled
from potluck.engine.cuda.triton_limits import FEW_ROWS, SPLIT_PAGES

_ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}
_DENSE_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_QUANTISED_GROUPS = 16  # of a program
_TRANSFERRED = 1024  # numbers of a program
_MULTIPROCESSORS = 132  # of an H100 or H200, which the cuts were measured on
_PIECES = 64  # of a row's sum of squares: every program of the next product adds them up
_TICKETS = 4096  # more than a product has tiles whose columns are shared
_SLAB_BYTES = 256 << 20  # of dequantised rows at a time, in products of many rows


class OneRow(NamedTuple):
    """How a one-row product is cut: rows of a thread, lanes and warps that share a row, runs of a thread in a step, warps."""

    rows: int
    lanes: int
    split: int
    unroll: int
    warps: int

    @property
    def program_rows(self) -> int:
        return self.rows * (self.warps // self.split) * (32 // self.lanes)

    @property
    def constants(self) -> dict[str, int]:
        return {
            "ROWS": self.rows, "LANES": self.lanes, "SPLIT": self.split, "UNROLL": self.unroll, "num_warps": self.warps,
        }  # fmt: skip


class FewRows(NamedTuple):
    """How a product of few rows is cut; `splits`: programs that share the columns of a tile."""

    rows: int
    columns: int
    warps: int
    stages: int
    splits: int = 1


class Tuning:
    """Which cut for which product. Measured on an H200 (docs/performance.md); overridden in benchmarks only."""

    def __init__(self) -> None:
        self.one_row: dict[tuple[int, int, bool], OneRow] = {}
        self.one_row_blocks: dict[tuple[int, int, bool], OneRow] = {}
        self.few_rows: dict[tuple[int, int, int], FewRows] = {}
        self.few_rows_blocks: dict[tuple[int, int, int], FewRows] = {}

    def dense_one(self, n: int, k: int, is_gated: bool) -> OneRow:
        if (n, k, is_gated) in self.one_row:
            return self.one_row[n, k, is_gated]
        if is_gated:
            return OneRow(4, 32, 8, 1, 8) if k <= 2048 else OneRow(4, 32, 1, 1, 4)
        return OneRow(4, 32, 8, 1, 8) if k <= 2048 or n > 65536 else OneRow(4, 32, 4, 1, 4)

    def blocks_one(self, n: int, k: int, is_gated: bool) -> OneRow:
        if (n, k, is_gated) in self.one_row_blocks:
            return self.one_row_blocks[n, k, is_gated]
        split = 4 if k > 2048 else 2
        if is_gated:
            return OneRow(2, 32, split, 1, 4)
        return OneRow(8 if k > 8192 else 4, 32, split, 1, 4)

    def dense_few(self, n: int, k: int, m: int, is_gated: bool, is_bf16: bool) -> FewRows:
        # Same columns per step for every number of rows: the order of sums must not depend on it.
        if (n, k, m) in self.few_rows:
            return self.few_rows[n, k, m]
        if not is_bf16:
            return FewRows(16 if n < 8192 else 32, min(128, _padded(k, 16)), 4, 3)
        columns = min(128, _padded(k, 16))
        tiles = -(-n // 64) // (2 if is_gated else 1)
        if is_gated:
            if tiles <= _MULTIPROCESSORS:
                return FewRows(64, columns, 4, 3)
            return FewRows(64, min(64, columns), *((4, 4) if tiles <= 2 * _MULTIPROCESSORS else (8, 3)))
        if tiles > _MULTIPROCESSORS:
            return FewRows(64, columns, 4, 3)
        splits = min(_MULTIPROCESSORS // tiles, 8, k // (2 * columns))  # a program for each multiprocessor
        return FewRows(64, columns, 4, 5, max(1, splits))

    def blocks_few(self, n: int, k: int, m: int) -> FewRows:
        return self.few_rows_blocks.get((n, k, m)) or FewRows(16 if n < 8192 else 32, 128, 4, 3)


def _padded(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())


class TritonOperations(PlainOperations):
    """`x_dtype`: what rows for the tensor cores are kept as: bf16, or float32 where a matrix of the model is."""

    def __init__(self, x_dtype: torch.dtype, *, is_batch_invariant: bool = False, tuning: Tuning | None = None) -> None:
        self._x_dtype = x_dtype
        self._is_batch_invariant = is_batch_invariant
        self.tuning = tuning or Tuning()
        self._tickets: torch.Tensor | None = None  # zero between kernels

    def _is_one(self, count: int) -> bool:
        return count == 1 and not self._is_batch_invariant

    # ------------------------------------------------------------ products

    def products(
        self, matrices: Sequence[Matrix], x: torch.Tensor, *, norm: torch.Tensor | None, epsilon: float,
        bias: torch.Tensor | None, is_exact: bool = False, unscaled: Unscaled | None = None,
    ) -> torch.Tensor:  # fmt: skip
        width, count = sum(matrix.rows for matrix in matrices), len(x)
        is_float = is_exact or count <= FEW_ROWS or self._x_dtype == torch.float32
        out = torch.empty((count, width), dtype=torch.float32 if is_float else self._x_dtype, device=x.device)
        unscaled = unscaled if _takes_unscaled(matrices) else None
        if norm is not None and unscaled is None and not self._is_one(count):
            x, norm = self._normed(x, norm, epsilon), None
        first = 0
        for matrix in matrices:
            part = out[:, first : first + matrix.rows]
            part_bias = None if bias is None else bias[first : first + matrix.rows]
            if unscaled is None:
                self._product(matrix, x, part, norm=norm, epsilon=epsilon, bias=part_bias)
            else:
                self._few_rows(matrix, unscaled, part, epsilon=epsilon, bias=part_bias)
            first += matrix.rows
        return out

    def add_product(
        self, matrix: Matrix, x: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor | None, next_norm: torch.Tensor | None
    ) -> Unscaled | None:  # fmt: skip
        # The order in which a tile's squares are summed depends on the number of rows.
        is_alone = self._is_batch_invariant or len(x) == 1 or len(x) > FEW_ROWS or not isinstance(matrix, DenseMatrix)
        if is_alone or next_norm is None:
            self._product(matrix, x, hidden, bias=bias, is_added=True)
            return None
        return self._few_rows(matrix, x, hidden, bias=bias, is_added=True, next_norm=next_norm)

    def gated(
        self, matrices: Sequence[Matrix], x: torch.Tensor, norm: torch.Tensor, epsilon: float, activation: Activation,
        following: Matrix, unscaled: Unscaled | None = None,
    ) -> torch.Tensor:  # fmt: skip
        count = len(x)
        if len(matrices) == 1 and count <= FEW_ROWS:
            dtype = torch.float32 if self._is_one(count) else self._x_dtype
            out = torch.empty((count, matrices[0].rows // 2), dtype=dtype, device=x.device)
            if unscaled is not None and _takes_unscaled(matrices):
                self._few_rows(matrices[0], unscaled, out, epsilon=epsilon, activation=_ACTIVATIONS[activation])
                return out
            kept: torch.Tensor | None = norm
            if not self._is_one(count):
                x, kept = self._normed(x, norm, epsilon), None
            self._product(
                matrices[0],
                x,
                out,
                norm=kept,
                epsilon=epsilon,
                activation=_ACTIVATIONS[activation],
            )
            return self._laid_out(out, following)
        both = self.products(matrices, x, norm=norm, epsilon=epsilon, bias=None, unscaled=unscaled)
        width = both.shape[1] // 2
        dtype = torch.float32 if self._is_one(count) else self._x_dtype
        out = torch.empty((count, width), dtype=dtype, device=x.device)
        rows.gate_kernel[(count, triton.cdiv(width, 1024))](
            both, out, K=width, ACTIVATION=_ACTIVATIONS[activation], BK=1024
        )
        return self._laid_out(out, following)

    def _laid_out(self, x: torch.Tensor, following: Matrix) -> torch.Tensor:
        """A row as its quantised matrix wants it."""
        if isinstance(following, BlockMatrix) and self._is_one(len(x)):
            return self._quantised(following, x, None, 0.0)
        return x

    def _product(
        self, matrix: Matrix, x: torch.Tensor, out: torch.Tensor, *, norm: torch.Tensor | None = None, epsilon: float = 0.0,
        bias: torch.Tensor | None = None, is_added: bool = False, activation: int = 0,
    ) -> None:  # fmt: skip
        count = len(x)
        if self._is_one(count):
            self._one_row(matrix, x, out, norm, epsilon, bias, is_added, activation)
        elif count <= FEW_ROWS:
            self._few_rows(matrix, x, out, bias=bias, is_added=is_added, activation=activation)
        else:
            self._many_rows(matrix, x, out, bias, is_added)

    def _one_row(
        self, matrix: Matrix, x: torch.Tensor, out: torch.Tensor, norm: torch.Tensor | None, epsilon: float,
        bias: torch.Tensor | None, is_added: bool, activation: int,
    ) -> None:  # fmt: skip
        n = matrix.rows // 2 if activation else matrix.rows
        flags: dict[str, Any] = {
            "K": matrix.columns, "HAS_BIAS": bias is not None, "ADDS": is_added, "ACTIVATION": activation,
        }  # fmt: skip
        n_bias = x if bias is None else bias
        if isinstance(matrix, DenseMatrix):
            cut = self.tuning.dense_one(matrix.rows, matrix.columns, bool(activation))
            dense_row.one_row_kernel[(triton.cdiv(n, cut.program_rows),)](
                x, x if norm is None else norm, matrix.weight, n_bias, out, n, n, epsilon, **flags,
                HAS_NORM=norm is not None, EACH=16 // matrix.weight.element_size(), **cut.constants,
            )  # fmt: skip
            return
        row = x if norm is None else self._quantised(matrix, x, norm, epsilon)
        cut = self.tuning.blocks_one(matrix.rows, matrix.columns, bool(activation))
        block_row.one_row_blocks_kernel[(triton.cdiv(n, cut.program_rows),)](
            row, *_packed(matrix), n_bias, out, n, n, **flags, **_kind(matrix), **cut.constants
        )  # fmt: skip

    def _quantised(
        self, matrix: BlockMatrix, x: torch.Tensor, norm: torch.Tensor | None, epsilon: float
    ) -> torch.Tensor:
        columns, groups = matrix.columns, matrix.columns // matrix.group
        out = _quantised_row(matrix, x.device)
        quantise.quantise_kernel[(triton.cdiv(groups, _QUANTISED_GROUPS),)](
            x, x if norm is None else norm, out, epsilon, K=columns, BITS=matrix.bits, GROUP=matrix.group,
            HAS_NORM=norm is not None, BK=min(4096, _padded(columns)), COUNT=_QUANTISED_GROUPS, num_warps=4,
        )  # fmt: skip
        return out

    def transfer(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """By a kernel: a graph of nothing but kernels starts sooner, and no copy engine has to be waited for."""
        count = source.numel()
        rows.transfer_kernel[(triton.cdiv(count, _TRANSFERRED),)](
            source, target, count, BLOCK=_TRANSFERRED, num_warps=4
        )

    def _few_rows(
        self, matrix: Matrix, x: torch.Tensor | Unscaled, out: torch.Tensor, *, epsilon: float = 0.0,
        bias: torch.Tensor | None = None, is_added: bool = False, activation: int = 0, next_norm: torch.Tensor | None = None,
    ) -> Unscaled | None:  # fmt: skip
        if isinstance(matrix, BlockMatrix):
            assert isinstance(x, torch.Tensor)
            self._few_rows_blocks(matrix, x, out, bias, is_added, activation)
            return None
        rows, squares = (x.rows, x.squares) if isinstance(x, Unscaled) else (x, None)
        n, m = matrix.rows // 2 if activation else matrix.rows, _padded(len(rows), 16)
        is_bf16 = matrix.weight.dtype == torch.bfloat16
        cut = self.tuning.dense_few(matrix.rows, matrix.columns, m, bool(activation), is_bf16)
        tiles, pieces = triton.cdiv(n, cut.rows), 0 if squares is None else len(squares)
        parts, tickets = self._room(rows, tiles, cut, m)
        result: Unscaled | None = None
        if next_norm is not None and tiles <= _PIECES:
            result = Unscaled(
                torch.empty((len(rows), n), dtype=self._x_dtype, device=rows.device),
                torch.empty((tiles, m), dtype=torch.float32, device=rows.device),
            )
        products.few_rows_kernel[(tiles, cut.splits)](
            rows, rows if squares is None else squares, matrix.weight, rows if bias is None else bias, out, parts, tickets,
            rows if next_norm is None else next_norm, rows if result is None else result.rows,
            rows if result is None else result.squares, n, n, len(rows), pieces, rows.stride(0), out.stride(0), epsilon,
            K=matrix.columns, HAS_BIAS=bias is not None, ADDS=is_added, ACTIVATION=activation, M=m,
            KIND=_DENSE_KINDS[matrix.weight.dtype], BN=cut.rows, BK=cut.columns, STAGES=cut.stages, SPLITS=cut.splits,
            PIECES=_padded(pieces) if pieces else 0, READIES=result is not None, num_warps=cut.warps,
        )  # fmt: skip
        return result

    def _room(self, x: torch.Tensor, tiles: int, cut: FewRows, m: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For the parts of tiles whose columns are shared, and for counting who is done."""
        if cut.splits == 1:
            return x, x
        if self._tickets is None:
            self._tickets = torch.zeros(_TICKETS, dtype=torch.int32, device=x.device)
        parts = torch.empty(tiles * cut.splits * cut.rows * m, dtype=torch.float32, device=x.device)
        return parts, self._tickets

    def _few_rows_blocks(
        self, matrix: BlockMatrix, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, is_added: bool, activation: int
    ) -> None:  # fmt: skip
        n, m = matrix.rows // 2 if activation else matrix.rows, _padded(len(x), 16)
        cut = self.tuning.blocks_few(matrix.rows, matrix.columns, m)
        blocks.few_rows_blocks_kernel[(triton.cdiv(n, cut.rows),)](
            x, *_tensors(matrix), x if bias is None else bias, out, n, n, len(x), x.stride(0), out.stride(0), K=matrix.columns,
            HAS_BIAS=bias is not None, ADDS=is_added, ACTIVATION=activation, M=m, **_kind(matrix), BN=cut.rows,
            BG=cut.columns // matrix.group, STAGES=cut.stages, num_warps=cut.warps,
        )  # fmt: skip

    def _many_rows(
        self, matrix: Matrix, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, is_added: bool
    ) -> None:
        if (
            isinstance(matrix, DenseMatrix)
            and not is_added
            and bias is None
            and out.dtype == x.dtype == matrix.weight.dtype
        ):
            torch.mm(x, matrix.weight.T, out=out)
            return
        # Slabs of an odd number of rows would take the library's slow way.
        slab = (
            matrix.rows
            if isinstance(matrix, DenseMatrix)
            else max(256, _SLAB_BYTES // (2 * matrix.columns) // 256 * 256)
        )
        for first in range(0, matrix.rows, slab):
            stop = min(first + slab, matrix.rows)
            result = _library_product(matrix, x, first, stop)
            if bias is not None:
                result = result + bias[first:stop]
            if is_added:
                out[:, first:stop] += result
            else:
                out[:, first:stop] = result

    def _normed(self, x: torch.Tensor, norm: torch.Tensor, epsilon: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=self._x_dtype, device=x.device)
        width = x.shape[1]
        rows.norm_kernel[(len(x),)](
            x, norm, out, epsilon, x.stride(0), width, K=width, ADDS=False, BK=min(4096, _padded(width)), num_warps=8
        )
        return out

    def add_normed(self, hidden: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, epsilon: float) -> None:
        width = x.shape[1]
        rows.norm_kernel[(len(x),)](
            x, norm, hidden, epsilon, x.stride(0), hidden.stride(0), K=width, ADDS=True, BK=min(4096, _padded(width)),
            num_warps=8,
        )  # fmt: skip

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        count, size = logits.shape
        span = 8192
        parts = triton.cdiv(size, span)
        values = torch.empty((count, parts), dtype=torch.float32, device=logits.device)
        ids = torch.empty((count, parts), dtype=torch.int32, device=logits.device)
        out = torch.empty(count, dtype=torch.int32, device=logits.device)
        rows.largest_kernel[(count, parts)](logits, values, ids, size, parts, BLOCK=span, num_warps=8)
        rows.likeliest_kernel[(count,)](values, ids, out, parts, BLOCK=_padded(parts, 2))
        return out

    # ------------------------------------------------------------ attention

    def attend(self, incoming: torch.Tensor, batch: Batch, facts: AttentionFacts, following: Matrix) -> torch.Tensor:
        is_one = self._is_one(len(incoming))
        dtype = torch.float32 if is_one else self._x_dtype
        out = torch.empty((len(incoming), facts.heads * facts.head_size), dtype=dtype, device=incoming.device)
        if isinstance(batch, ChunkBatch):
            self._attend_chunk(incoming, batch, facts, out)
            return self._laid_out(out, following)
        if is_one and isinstance(following, BlockMatrix) and _is_whole(facts.head_size, following.group):
            out = _quantised_row(following, incoming.device)
            self._attend_rows(incoming, batch, facts, out, following)
            return out
        self._attend_rows(incoming, batch, facts, out, None)
        return self._laid_out(out, following)

    def _attend_rows(
        self, incoming: torch.Tensor, batch: RowBatch, facts: AttentionFacts, out: torch.Tensor, following: BlockMatrix | None
    ) -> None:  # fmt: skip
        """`following`: what the only row is quantised for; None: it stays as it is."""
        count, splits = len(incoming), batch.splits
        after = {
            "NEXT_BITS": 0 if following is None else following.bits, "NEXT_GROUP": 0 if following is None else following.group,
        }  # fmt: skip
        size = count * facts.heads * splits * (facts.head_size + 2) if splits > 1 else 1
        parts = torch.empty(size, dtype=torch.float32, device=incoming.device)
        attention.attend_rows_kernel[(count, facts.kv_heads, splits)](
            incoming, *_norms(facts, incoming), facts.cos, facts.sin, facts.keys, facts.values, facts.tables, batch.positions,
            batch.table_rows, out, parts, incoming.stride(0), facts.tables.stride(0), out.stride(0), facts.scale,
            facts.soft_cap or 0.0, facts.window or 0, facts.epsilon, **_attention_flags(facts),
            GROUP=_padded(facts.heads // facts.kv_heads, 16), HAS_WINDOW=facts.window is not None, SPLITS=splits,
            HAS_CAP=facts.soft_cap is not None, SPLIT_PAGES=SPLIT_PAGES, **after, num_warps=2, num_stages=2,
        )  # fmt: skip
        if splits > 1:
            attention.merge_spans_kernel[(count, facts.heads)](
                parts, batch.positions, out, out.stride(0), HEADS=facts.heads, D=facts.head_size,
                PADDED=_padded(facts.head_size, 16), SPLITS=splits, **after, num_warps=2,
            )  # fmt: skip

    def _attend_chunk(
        self, incoming: torch.Tensor, batch: ChunkBatch, facts: AttentionFacts, out: torch.Tensor
    ) -> None:
        queries = torch.empty(
            (batch.count, facts.heads * facts.head_size), dtype=facts.keys.dtype, device=incoming.device
        )
        table = facts.tables[batch.table_row]
        attention.place_chunk_kernel[(batch.count,)](
            incoming, *_norms(facts, incoming), facts.cos, facts.sin, facts.keys, facts.values, table, queries, batch.start,
            incoming.stride(0), facts.scale, facts.epsilon, **_attention_flags(facts), HEADS_PADDED=_padded(facts.heads),
            KV_PADDED=_padded(facts.kv_heads), num_warps=4,
        )  # fmt: skip
        block = 16 if batch.count <= 16 else 64 if facts.keys.dtype == torch.float32 or facts.head_size > 128 else 128
        flags = {name: value for name, value in _attention_flags(facts).items() if name in _CHUNK_FLAGS}
        attention.attend_chunk_kernel[(triton.cdiv(batch.count, block), facts.heads)](
            queries, facts.keys, facts.values, table, out, batch.start, batch.count, facts.soft_cap or 0.0, facts.window or 0,
            **flags, HAS_CAP=facts.soft_cap is not None, HAS_WINDOW=facts.window is not None, BM=block,
            num_warps=8 if block == 128 else 4, num_stages=2,
        )  # fmt: skip


_CHUNK_FLAGS = ("HEADS", "KV_HEADS", "D", "PADDED", "IS_HALF")


def _attention_flags(facts: AttentionFacts) -> dict[str, Any]:
    return {
        "HEADS": facts.heads, "KV_HEADS": facts.kv_heads, "D": facts.head_size, "PADDED": _padded(facts.head_size, 16),
        "ROTARY": facts.rotary_dimensions, "INTERLEAVED": facts.is_interleaved, "HAS_NORM": facts.query_norm is not None,
        "IS_HALF": facts.keys.dtype == torch.float16,
    }  # fmt: skip


def _norms(facts: AttentionFacts, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    query, key = facts.query_norm, facts.key_norm
    return other if query is None else query, other if key is None else key


def _takes_unscaled(matrices: Sequence[Matrix]) -> bool:
    return all(isinstance(matrix, DenseMatrix) for matrix in matrices)


def _tensors(matrix: BlockMatrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return matrix.quants, matrix.scales, matrix.scales if matrix.supers is None else matrix.supers


def _packed(matrix: BlockMatrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes as words, pairs as one number."""
    quants, scales, supers = _tensors(matrix)
    if matrix.kind == "affine":
        scales = scales.view(torch.int32)
    elif matrix.kind == "super":
        scales, supers = scales.view(torch.int16), supers.view(torch.int32)
    return quants.view(torch.int32), scales, supers


def _quantised_row(matrix: BlockMatrix, device: torch.device) -> torch.Tensor:
    """Room for a row as `kernels.quantise` lays it out."""
    return torch.empty(
        (1, matrix.columns // 4 + 2 * (matrix.columns // matrix.group)), dtype=torch.int32, device=device
    )


def _is_whole(head_size: int, group: int) -> bool:
    """Whether a head is some groups and nothing else."""
    return head_size % group == 0 and head_size == _padded(head_size, 16)


def _kind(matrix: BlockMatrix) -> dict[str, int]:
    return {
        "GROUP": matrix.group, "BITS": matrix.bits, "KIND": SCALE_KINDS.index(matrix.kind), "ZERO": matrix.zero,
    }  # fmt: skip


def _library_product(matrix: Matrix, x: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    if isinstance(matrix, BlockMatrix):
        return x.to(torch.bfloat16) @ _dequantised(matrix, first, stop).T
    weight = matrix.weight[first:stop]
    if weight.dtype == torch.float16:
        # Rows can be larger than fp16 reaches: scaled to their largest value, they cannot.
        largest = x.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-30)
        return ((x.float() / largest).half() @ weight.T).float() * largest
    return x.to(weight.dtype) @ weight.T


def _dequantised(matrix: BlockMatrix, first: int, stop: int) -> torch.Tensor:
    out = torch.empty((stop - first, matrix.columns), dtype=torch.bfloat16, device=matrix.quants.device)
    groups = matrix.columns // matrix.group
    span = min(128, _padded(groups))
    blocks.dequantise_kernel[(stop - first, triton.cdiv(groups, span))](
        *_tensors(matrix), out, first, K=matrix.columns, **_kind(matrix), BG=span, num_warps=4
    )
    return out
