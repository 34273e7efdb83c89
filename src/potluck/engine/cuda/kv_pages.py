"""Keys and values on a device: one pool of pages of 64 positions for all of a shard's layers, and a page table per session.

The pool has a fixed address, because captured graphs hold it; what a session has reserved is counted by `KvCache`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from potluck.core.errors import BadRequest, OutOfKvMemory
from potluck.engine.kv_cache import KvCache, KvPage, KvSession, KvShape
from potluck.engine.kv_format import PAGE_POSITIONS

MAX_SESSIONS = 512


class DevicePage(KvPage):
    """A slot of the pool; `address` is its number."""

    def __init__(self, slot: int) -> None:
        self.address = slot
        self.users = 1


class DeviceKvShape(KvShape):
    """Not padded and not tiled: keys and values of a head lie position by position."""

    @property
    def head_bytes(self) -> int:
        return 2 * self.head_size * PAGE_POSITIONS * self.element_bytes


class DeviceKvCache(KvCache):
    """`keys` and `values` are (layers, slots, heads, 64, head size). Every slot has all of the shard's layers."""

    def __init__(
        self, shape: DeviceKvShape, layers: int, budget_bytes: int, max_positions: int, device: torch.device
    ) -> None:
        super().__init__(shape, budget_bytes)
        self._layers = layers
        slot_bytes = shape.page_bytes(layers)
        self.slots = max(1, budget_bytes // slot_bytes) if slot_bytes else 1
        dtype = torch.float16 if shape.is_half else torch.float32
        size = (layers, self.slots, shape.kv_heads, PAGE_POSITIONS, shape.head_size)
        self.keys = torch.zeros(size, dtype=dtype, device=device)
        self.values = torch.zeros(size, dtype=dtype, device=device)
        self._free = list(range(self.slots - 1, -1, -1))
        self.max_pages = -(-min(max_positions, self.slots * PAGE_POSITIONS) // PAGE_POSITIONS) if slot_bytes else 1
        self.tables = torch.zeros((MAX_SESSIONS, self.max_pages), dtype=torch.int32, device=device)
        self._free_rows = list(range(MAX_SESSIONS - 1, -1, -1))
        self._rows: dict[int, int] = {}
        self._published: set[int] = set()  # sessions whose row of the device's table is up to date

    @property
    def max_positions(self) -> int:
        return self.max_pages * PAGE_POSITIONS

    @property
    def size_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.keys, self.values, self.tables))

    def _page_bytes(self, layers: int) -> int:
        return self.shape.page_bytes(self._layers)

    def open(self, positions: int, layers: int) -> KvSession:
        session = super().open(positions, layers)
        if not self._free_rows:
            self.close(session)
            raise OutOfKvMemory(f"{MAX_SESSIONS} sessions are open on this device")
        self._rows[id(session)] = self._free_rows.pop()
        return session

    def close(self, session: KvSession) -> None:
        super().close(session)
        row = self._rows.pop(id(session), None)
        if row is not None:
            self._free_rows.append(row)

    def _put(self, session: KvSession, index: int, page: KvPage) -> None:
        super()._put(session, index, page)
        self._published.discard(id(session))

    def _drop(self, session: KvSession, keep: int) -> None:
        super()._drop(session, keep)
        self._published.discard(id(session))

    def release(self) -> None:
        """Gives the pool back; nothing works afterwards."""
        del self.keys, self.values, self.tables

    def publish(self, sessions: Sequence[KvSession]) -> list[int]:
        """The sessions' rows of the device's page tables, brought up to date. Queued on the current stream."""
        stale = [session for session in sessions if id(session) not in self._published]
        if stale:
            self._published.update(map(id, stale))
            self._write_tables(stale)
        return [self._rows[id(session)] for session in sessions]

    def published_row(self, session: KvSession) -> int:
        """`publish` for one."""
        return self._rows[id(session)] if id(session) in self._published else self.publish([session])[0]

    def _write_tables(self, sessions: Sequence[KvSession]) -> None:
        """All in one copy: sessions that began together need their next pages together."""
        if not self._layers:
            return
        width = max(len(session.pages) for session in sessions)
        packed = np.zeros((len(sessions), 1 + width), np.int32)
        for row, session in zip(packed, sessions, strict=True):
            row[0] = self._rows[id(session)]
            row[1 : 1 + len(session.pages)] = [page.address for page in session.pages]
        given = torch.from_numpy(packed).to(self.tables.device)
        self.tables[given[:, 0].long(), :width] = given[:, 1:]

    def _new_page(self, size_bytes: int) -> KvPage:
        if not self._layers:
            return DevicePage(0)
        if not self._free:
            raise OutOfKvMemory("the device's pool of KV pages is used up")
        return DevicePage(self._free.pop())

    def _copy_page(self, page: KvPage) -> KvPage:
        twin = self._new_page(0)
        if self._layers:
            self.keys[:, twin.address].copy_(self.keys[:, page.address])
            self.values[:, twin.address].copy_(self.values[:, page.address])
        return twin

    def _free_page(self, page: KvPage) -> None:
        if self._layers:
            self._free.append(page.address)

    def export(
        self, session: KvSession, first: int, last: int
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        slots = torch.tensor([page.address for page in session.pages], dtype=torch.int64, device=self.keys.device)
        keys, values = (self._gathered(pool, slots, first, last, session.length) for pool in (self.keys, self.values))
        return keys, values

    def _gathered(
        self, pool: torch.Tensor, slots: torch.Tensor, first: int, last: int, length: int
    ) -> npt.NDArray[np.generic]:
        part = pool[first:last].index_select(1, slots)  # (layers, pages, heads, 64, size)
        flat = part.transpose(2, 3).reshape(last - first, -1, self.shape.kv_heads, self.shape.head_size)
        result: npt.NDArray[np.generic] = flat[:, :length].cpu().numpy()
        return result

    def import_(
        self, session: KvSession, first: int, last: int, keys: npt.NDArray[np.generic], values: npt.NDArray[np.generic]
    ) -> None:
        self._prepare_import(session, first, last, keys, values)
        for pool, array in ((self.keys, keys), (self.values, values)):
            given = torch.from_numpy(np.ascontiguousarray(array)).to(pool.device)
            for number, page in enumerate(session.pages):
                part = given[:, number * PAGE_POSITIONS : (number + 1) * PAGE_POSITIONS]
                pool[first:last, page.address, :, : part.shape[1]] = part.transpose(1, 2)

    def _prepare_import(self, session: KvSession, first: int, last: int, keys: Any, values: Any) -> None:
        shape = self.shape
        wanted = (last - first, keys.shape[1] if keys.ndim == 4 else -1, shape.kv_heads, shape.head_size)
        for name, array in (("keys", keys), ("values", values)):
            if array.shape != wanted or array.dtype != shape.dtype:
                raise BadRequest(
                    f"imported {name} are {array.dtype} {array.shape}, not {np.dtype(shape.dtype)} {wanted}"
                )
        count = keys.shape[1]
        if session.length not in (0, count):
            raise BadRequest(f"cannot import {count} positions into a session that has {session.length}")
        if session.length == 0:
            self.extend(session, count)
            session.length = count
        self._own_pages(session, 0, -(-count // PAGE_POSITIONS))
