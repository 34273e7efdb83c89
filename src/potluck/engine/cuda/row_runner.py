"""One token of each of several sessions through a shard: from pinned memory to pinned memory, as one captured graph per bucket.

Buffers and graphs are made once and keep their addresses. Without a GPU the same steps run one after the other.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from potluck.engine.cuda.batches import RowBatch
from potluck.engine.cuda.decoder import Decoder
from potluck.engine.cuda.triton_limits import FEW_ROWS, SPLIT_POSITIONS

Floats = npt.NDArray[np.float32]
Head = Literal["none", "logits", "likeliest"]
BUCKETS = (1, 2, 4, 8, 16, 32, FEW_ROWS)
_SPLIT_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096)
TOKEN, POSITION, TABLE_ROW = range(3)


class RowKey(NamedTuple):
    """What a graph is captured for."""

    bucket: int
    splits: int
    first: int
    stop: int
    takes_tokens: bool
    head: Head
    gives_hidden: bool


class Row(NamedTuple):
    token: int
    position: int
    table_row: int


class RowRunner:
    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder, self._device = decoder, device
        self._has_graphs = device.type == "cuda"
        hidden_size, vocabulary_size = decoder.facts.hidden_size, decoder.facts.vocabulary_size
        self._vocabulary_size = vocabulary_size
        self._integers = torch.zeros((3, FEW_ROWS), dtype=torch.int32, device=device)
        self._hidden = torch.zeros((FEW_ROWS, hidden_size), dtype=torch.float32, device=device)
        self._host_integers = self._host((3, FEW_ROWS), torch.int32)
        self._host_hidden = self._host((FEW_ROWS, hidden_size), torch.float32)
        self._host_output = self._host((FEW_ROWS, hidden_size), torch.float32)
        self._host_likeliest = self._host((FEW_ROWS,), torch.int32)
        self._host_logits: torch.Tensor | None = None
        self._integers_view, self._hidden_view = self._host_integers.numpy(), self._host_hidden.numpy()
        self._output_view, self._likeliest_view = self._host_output.numpy(), self._host_likeliest.numpy()
        self._stream = torch.cuda.current_stream(device) if self._has_graphs else None
        self._nothing = torch.zeros(1, device=device)
        self._graphs: dict[RowKey, torch.cuda.CUDAGraph] = {}
        self._pool: object | None = None

    def _host(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self._has_graphs)

    def run(
        self, rows: Sequence[Row], hidden: Sequence[Floats], first: int, stop: int, head: Head, *, gives_hidden: bool
    ) -> None:  # fmt: skip
        """Results lie in `output`, `logits` and `likeliest` until the next run. `hidden`: a row each, or none: tokens."""
        columns = tuple([row[i] for row in rows] for i in range(3))
        key = self._key(columns[POSITION], not hidden, first, stop, head, gives_hidden=gives_hidden)
        self._give(columns, hidden, key.bucket)
        if head == "logits" and self._host_logits is None:
            self._host_logits = self._host((FEW_ROWS, self._vocabulary_size), torch.float32)
        self._run(key)

    def run_one(
        self, row: Row, hidden: Floats | None, first: int, stop: int, head: Head, *, gives_hidden: bool
    ) -> bool:  # fmt: skip
        """`run` for a single row whose graph is there; false, and nothing done, where it is not."""
        splits = next(splits for splits in _SPLIT_BUCKETS if splits * SPLIT_POSITIONS > row.position)
        key = RowKey(1, splits, first, stop, hidden is None, head, gives_hidden)
        if not self._is_ready(key):
            return False
        self._integers_view[:, 0] = row
        if hidden is not None:
            self._hidden_view[:1] = hidden
        self._run(key)
        return True

    def run_again(
        self, columns: tuple[list[int], ...], hidden: Sequence[Floats], first: int, stop: int, head: Head, *, gives_hidden: bool
    ) -> bool:  # fmt: skip
        """`run` where its graph is there; false, and nothing done, where it is not. `columns`: tokens, positions, table rows."""
        key = self._key(columns[POSITION], not hidden, first, stop, head, gives_hidden=gives_hidden)
        if not self._is_ready(key):
            return False
        self._give(columns, hidden, key.bucket)
        self._run(key)
        return True

    def _is_ready(self, key: RowKey) -> bool:
        if self._has_graphs:
            return key in self._graphs
        return key.head != "logits" or self._host_logits is not None

    def _key(
        self, positions: list[int], takes_tokens: bool, first: int, stop: int, head: Head, *, gives_hidden: bool
    ) -> RowKey:  # fmt: skip
        count, last = len(positions), max(positions)
        bucket = next(bucket for bucket in BUCKETS if bucket >= count)
        splits = next(splits for splits in _SPLIT_BUCKETS if splits * SPLIT_POSITIONS > last)
        return RowKey(bucket, splits, first, stop, takes_tokens, head, gives_hidden)

    def _give(self, columns: tuple[list[int], ...], hidden: Sequence[Floats], bucket: int) -> None:
        """Into pinned memory, which the graph reads. Rows that nobody has stay at the position -1."""
        count = len(columns[0])
        self._integers_view[:, :count] = columns
        if bucket > count:
            self._integers_view[POSITION, count:bucket] = -1
        for place, row in enumerate(hidden):
            self._hidden_view[place] = row

    def prepare(self, first: int, stop: int, *, takes_tokens: bool, head: Head) -> None:
        """Captures what decoding up to four spans of positions needs. No row is anybody's."""
        self._host_integers.zero_()
        self._host_integers[POSITION] = -1
        for bucket in BUCKETS[:-1]:
            for splits in _SPLIT_BUCKETS[:2]:
                self._run(RowKey(bucket, splits, first, stop, takes_tokens, head, head == "none"))

    def claim_device(self) -> None:
        """A kernel that does nothing of use."""
        self._nothing.neg_()

    def output(self, count: int) -> Floats:
        return self._output_view[:count].copy()

    def logits(self, row: int) -> Floats:
        assert self._host_logits is not None
        logits: Floats = self._host_logits.numpy()[row].copy()
        return logits

    def likeliest(self, count: int) -> list[int]:
        tokens: list[int] = self._likeliest_view[:count].tolist()
        return tokens

    def _run(self, key: RowKey) -> None:
        if not self._has_graphs:
            self._steps(key)
            return
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(key)
        self._replay(graph)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        graph.replay()
        assert self._stream is not None
        self._stream.synchronize()

    def _capture(self, key: RowKey) -> torch.cuda.CUDAGraph:
        """Running it first compiles kernels; what it stores, the graph stores again."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._steps(key)
        torch.cuda.current_stream(self._device).wait_stream(side)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):  # type: ignore[arg-type]
            self._steps(key)
        self._pool = self._pool or graph.pool()  # graphs never run side by side
        return graph

    def _steps(self, key: RowKey) -> None:
        decoder, bucket = self._decoder, key.bucket
        decoder.transfer(self._host_integers, self._integers)
        batch = RowBatch(self._integers[POSITION, :bucket], self._integers[TABLE_ROW, :bucket], key.splits)
        if key.takes_tokens:
            hidden = decoder.embed(self._integers[TOKEN, :bucket])
        else:
            hidden = self._hidden[:bucket]
            decoder.transfer(self._host_hidden[:bucket], hidden)
        decoder.run(hidden, batch, key.first, key.stop)
        if key.gives_hidden:
            decoder.transfer(hidden, self._host_output[:bucket])
        if key.head == "none":
            return
        logits = decoder.logits(hidden)
        if key.head == "likeliest":
            decoder.transfer(decoder.likeliest(logits), self._host_likeliest[:bucket])
        else:
            assert self._host_logits is not None
            self._host_logits[:bucket].copy_(logits, non_blocking=True)

    def close(self) -> None:
        self._graphs.clear()
