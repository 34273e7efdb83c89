"""Keys and values of sessions in pages of 64 positions, each holding all layers of a shard; counted against a byte budget.

A forked session shares its parent's pages and copies the one it is about to write into. Knows nothing of tokens or kernels.
"""

import mmap
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from potluck.core.errors import BadRequest, OutOfKvMemory
from potluck.engine.kv_format import PAGE_POSITIONS, TILE
from potluck.engine.system_memory import private_memory


@dataclass(frozen=True)
class KvShape:
    """One layer of a page. Keys: (tiles of 32 positions, dimension, 32); values: (tiles of 32 dimensions, position, 32)."""

    kv_heads: int
    head_size: int
    is_half: bool

    @property
    def dtype(self) -> type[np.float16] | type[np.float32]:
        return np.float16 if self.is_half else np.float32

    @property
    def element_bytes(self) -> int:
        return 2 if self.is_half else 4

    @property
    def padded_head(self) -> int:
        return -(-self.head_size // TILE) * TILE

    @property
    def values_offset(self) -> int:
        return self.head_size * PAGE_POSITIONS * self.element_bytes

    @property
    def head_bytes(self) -> int:
        return self.values_offset + self.padded_head * PAGE_POSITIONS * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    def page_bytes(self, layers: int) -> int:
        return layers * self.layer_bytes


class KvPage:
    """64 positions of memory of its own, given back to the system when the last session lets go of it."""

    def __init__(self, size_bytes: int) -> None:
        # A stage without layers keeps nothing, but a mapping of nothing cannot be had.
        self._map = _page_memory(max(1, size_bytes))
        self.bytes = np.frombuffer(self._map, np.uint8)[:size_bytes]
        self.address = self.bytes.ctypes.data
        self.users = 1

    def copy(self) -> "KvPage":
        twin = KvPage(len(self.bytes))
        twin.bytes[:] = self.bytes
        return twin


def _page_memory(size_bytes: int) -> mmap.mmap:
    try:
        return private_memory(size_bytes)
    except OSError as error:
        raise OutOfKvMemory(f"the system gives no more memory for the KV cache: {error}") from error


@dataclass
class KvSession:
    """One session's positions in `layers` layers. `reserved_pages` were promised; pages come into being as they are needed."""

    layers: int
    page_bytes: int
    reserved_pages: int
    length: int = 0
    pages: list[KvPage] = field(default_factory=list)
    addresses: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.table_address = int(self.addresses.ctypes.data)  # where kernels find the addresses


class KvCache:
    """Owns every page. The budget counts what sessions have reserved, so that a session that was opened never runs dry."""

    def __init__(self, shape: KvShape, budget_bytes: int) -> None:
        self.shape = shape
        self.budget_bytes = self.capacity_bytes = budget_bytes  # the budget may be lowered, and raised again up to this
        self.reserved_bytes = 0
        self.used_bytes = 0
        self.changes = 0  # how often some session's pages were dropped or shared: addresses taken before do not hold

    def __repr__(self) -> str:
        return f"<KvCache {self.used_bytes >> 20} MiB used, {self.reserved_bytes >> 20} reserved of {self.budget_bytes >> 20}>"

    def open(self, positions: int, layers: int) -> KvSession:
        """A session with room for `positions` in `layers` layers, or OutOfKvMemory; nothing is allocated yet."""
        if positions < 1:
            raise BadRequest(f"a session needs room for at least one position, not {positions}")
        pages = -(-positions // PAGE_POSITIONS)
        page_bytes = self._page_bytes(layers)
        wanted = pages * page_bytes
        if self.reserved_bytes + wanted > self.budget_bytes:
            free = max(0, self.budget_bytes - self.reserved_bytes)
            raise OutOfKvMemory(
                f"{positions} positions need {wanted} bytes of KV cache; {free} of {self.budget_bytes} are free"
            )
        self.reserved_bytes += wanted
        return KvSession(layers, page_bytes, pages, addresses=np.zeros(pages, np.int64))

    def _page_bytes(self, layers: int) -> int:
        return self.shape.page_bytes(layers)

    def fork(self, parent: KvSession, positions: int) -> KvSession:
        """A session that starts with all of the parent's positions and has room for `positions` in all."""
        child = self.open(max(positions, parent.length, 1), parent.layers)
        child.pages = parent.pages[: -(-parent.length // PAGE_POSITIONS)]
        self.changes += 1
        for page in child.pages:
            page.users += 1
        child.addresses[: len(child.pages)] = [page.address for page in child.pages]
        child.length = parent.length
        return child

    def close(self, session: KvSession) -> None:
        self._drop(session, 0)
        self.reserved_bytes -= session.reserved_pages * session.page_bytes
        session.reserved_pages = 0
        session.length = 0

    def shrink(self, session: KvSession) -> None:
        """Gives back what was reserved and is not used; the session takes no further positions. Forks of it do."""
        unused = session.reserved_pages - len(session.pages)
        session.reserved_pages -= unused
        self.reserved_bytes -= unused * session.page_bytes

    def truncate(self, session: KvSession, length: int) -> None:
        if not 0 <= length <= session.length:
            raise BadRequest(f"cannot truncate a session of {session.length} positions to {length}")
        self._drop(session, -(-length // PAGE_POSITIONS))
        session.length = length

    def extend(self, session: KvSession, count: int) -> None:
        """Makes the next `count` positions writable: missing pages appear, shared ones are copied."""
        page = session.length // PAGE_POSITIONS
        if count == 1 and page < len(session.pages) and session.pages[page].users == 1:
            return  # as nearly always
        self.require_room(session, count)
        needed = -(-(session.length + count) // PAGE_POSITIONS)
        self._own_pages(session, session.length // PAGE_POSITIONS, needed)

    def require_room(self, session: KvSession, count: int) -> None:
        """Raises OutOfKvMemory where the next `count` positions are more than were reserved."""
        end = session.length + count
        if -(-end // PAGE_POSITIONS) > session.reserved_pages:
            raise OutOfKvMemory(
                f"position {end - 1} is past the {session.reserved_pages * PAGE_POSITIONS} that were reserved"
            )

    def _own_pages(self, session: KvSession, first: int, stop: int) -> None:
        """Pages first … stop - 1 exist and are this session's alone."""
        for index in range(first, stop):
            if index == len(session.pages):
                self._put(session, index, self._new_page(session.page_bytes))
            elif session.pages[index].users > 1:
                shared = session.pages[index]
                own = self._copy_page(shared)  # may fail: until it has not, the session is one of the page's users
                shared.users -= 1
                self._put(session, index, own)

    def _new_page(self, size_bytes: int) -> KvPage:
        return KvPage(size_bytes)

    def _copy_page(self, page: KvPage) -> KvPage:
        return page.copy()

    def _free_page(self, page: KvPage) -> None:
        """Nobody uses it any more. Its memory goes with the object."""

    def _put(self, session: KvSession, index: int, page: KvPage) -> None:
        session.pages[index : index + 1] = [page]
        session.addresses[index] = page.address
        self.used_bytes += session.page_bytes

    def _drop(self, session: KvSession, keep: int) -> None:
        self.changes += 1
        for page in session.pages[keep:]:
            page.users -= 1
            if page.users == 0:
                self.used_bytes -= session.page_bytes
                self._free_page(page)
        del session.pages[keep:]

    def export(
        self, session: KvSession, first: int, last: int
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        """Keys and values of layers first … last - 1 (counted within the session), each (layers, positions, heads, size)."""
        keys, values = [], []
        for page in session.pages:
            page_keys, page_values = self._views(page, first, last)
            # (layers, heads, tiles, size, 32) → (layers, positions, heads, size)
            keys.append(
                page_keys.transpose(0, 2, 4, 1, 3).reshape(last - first, PAGE_POSITIONS, -1, self.shape.head_size)
            )
            # (layers, heads, tiles, positions, 32) → (layers, positions, heads, size)
            flat = page_values.transpose(0, 3, 1, 2, 4).reshape(last - first, PAGE_POSITIONS, self.shape.kv_heads, -1)
            values.append(flat[..., : self.shape.head_size])
        if not keys:
            empty = np.zeros((last - first, 0, self.shape.kv_heads, self.shape.head_size), self.shape.dtype)
            return empty, empty
        cut = slice(0, session.length)
        return np.concatenate(keys, axis=1)[:, cut], np.concatenate(values, axis=1)[:, cut]

    def import_(
        self, session: KvSession, first: int, last: int, keys: npt.NDArray[np.generic], values: npt.NDArray[np.generic]
    ) -> None:
        """Writes what `export` gave into an empty session, or into further layers of one that has as many positions."""
        wanted = (last - first, keys.shape[1] if keys.ndim == 4 else -1, self.shape.kv_heads, self.shape.head_size)
        for name, array in (("keys", keys), ("values", values)):
            if array.shape != wanted or array.dtype != self.shape.dtype:
                raise BadRequest(
                    f"imported {name} are {array.dtype} {array.shape}, not {np.dtype(self.shape.dtype)} {wanted}"
                )
        count = keys.shape[1]
        if session.length not in (0, count):
            raise BadRequest(f"cannot import {count} positions into a session that has {session.length}")
        if session.length == 0:
            self.extend(session, count)
            session.length = count
        self._own_pages(session, 0, -(-count // PAGE_POSITIONS))
        for number, page in enumerate(session.pages):
            self._fill(page, first, last, keys[:, number * PAGE_POSITIONS :], values[:, number * PAGE_POSITIONS :])

    def _fill(
        self, page: KvPage, first: int, last: int, keys: npt.NDArray[np.generic], values: npt.NDArray[np.generic]
    ) -> None:
        shape = self.shape
        count = min(PAGE_POSITIONS, keys.shape[1])
        page_keys, page_values = self._views(page, first, last)
        whole = np.zeros((last - first, PAGE_POSITIONS, shape.kv_heads, shape.padded_head), shape.dtype)
        whole[:, :count, :, : shape.head_size] = keys[:, :count]
        tiles = whole[..., : shape.head_size].reshape(last - first, -1, TILE, shape.kv_heads, shape.head_size)
        page_keys[:] = tiles.transpose(0, 3, 1, 4, 2)
        whole[:, :count, :, : shape.head_size] = values[:, :count]
        split = whole.reshape(last - first, PAGE_POSITIONS, shape.kv_heads, -1, TILE)
        page_values[:] = split.transpose(0, 2, 3, 1, 4)

    def _views(self, page: KvPage, first: int, last: int) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]:
        shape = self.shape
        layers = page.bytes[first * shape.layer_bytes : last * shape.layer_bytes]
        heads = layers.reshape(last - first, shape.kv_heads, shape.head_bytes)
        keys = heads[..., : shape.values_offset].view(shape.dtype)
        values = heads[..., shape.values_offset :].view(shape.dtype)
        return (
            keys.reshape(last - first, shape.kv_heads, PAGE_POSITIONS // TILE, shape.head_size, TILE),
            values.reshape(last - first, shape.kv_heads, shape.padded_head // TILE, PAGE_POSITIONS, TILE),
        )
