"""Pages of keys and values: budget, growth, sharing between forks, export and import."""

import contextlib
import os
import random

import numpy as np
import pytest

from potluck.core.errors import BadRequest, OutOfKvMemory
from potluck.engine.kv_cache import KvCache, KvSession, KvShape
from tests.support.same_bits import assert_same_bits

IS_LONG = bool(os.environ.get("POTLUCK_LONG"))
PAGE = 64
LAYERS = 2
SHAPE = KvShape(kv_heads=2, head_size=24, is_half=True)
PAGE_BYTES = SHAPE.page_bytes(LAYERS)
SHAPES = [
    SHAPE,
    KvShape(1, 8, False),
    KvShape(2, 64, True),
    KvShape(3, 80, False),
    KvShape(2, 128, True),
    KvShape(1, 2, True),
]


def cache_of(pages: int, shape: KvShape = SHAPE) -> KvCache:
    return KvCache(shape, pages * shape.page_bytes(LAYERS))


def opened(cache: KvCache, positions: int) -> KvSession:
    return cache.open(positions, LAYERS)


def random_kv(shape: KvShape, layers: int, positions: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    size = (2, layers, positions, shape.kv_heads, shape.head_size)
    keys, values = rng.standard_normal(size).astype(shape.dtype)
    return keys, values


def filled(cache: KvCache, positions: int, room: int | None = None, seed: int = 0) -> KvSession:
    session = opened(cache, room or positions)
    cache.import_(session, 0, LAYERS, *random_kv(cache.shape, LAYERS, positions, seed))
    return session


# ---------------------------------------------------------------- budget


def test_opening_reserves_whole_pages_and_allocates_nothing() -> None:
    cache = cache_of(3)
    opened(cache, 65)
    assert cache.reserved_bytes == 2 * PAGE_BYTES
    assert cache.used_bytes == 0
    opened(cache, 64)
    with pytest.raises(OutOfKvMemory, match="0 of"):
        opened(cache, 1)


def test_a_refusal_changes_nothing_and_closing_makes_room() -> None:
    cache = cache_of(2)
    first = opened(cache, PAGE)
    for positions in (129, PAGE + 1, 10**12):
        with pytest.raises(OutOfKvMemory):
            opened(cache, positions)
    assert cache.reserved_bytes == PAGE_BYTES
    cache.close(first)
    assert (cache.reserved_bytes, cache.used_bytes) == (0, 0)
    opened(cache, 2 * PAGE)


@pytest.mark.parametrize("positions", [0, -1, -(10**9)])
def test_a_session_without_positions_is_refused(positions: int) -> None:
    with pytest.raises(BadRequest):
        opened(cache_of(2), positions)


def test_a_session_cannot_grow_past_what_it_reserved() -> None:
    cache = cache_of(4)
    session = opened(cache, PAGE)
    cache.extend(session, PAGE)
    session.length = PAGE
    with pytest.raises(OutOfKvMemory, match="past the 64"):
        cache.extend(session, 1)
    assert (session.length, len(session.pages), cache.used_bytes) == (PAGE, 1, PAGE_BYTES)


def test_sessions_of_different_depths_share_one_budget() -> None:
    cache = cache_of(3)
    shallow, deep = cache.open(PAGE, 1), cache.open(PAGE, 4)
    assert cache.reserved_bytes == SHAPE.page_bytes(5)
    for session in (shallow, deep):
        cache.import_(session, 0, session.layers, *random_kv(SHAPE, session.layers, 10))
    assert cache.used_bytes == SHAPE.page_bytes(5)
    for session in (deep, shallow):
        cache.close(session)
    assert (cache.reserved_bytes, cache.used_bytes) == (0, 0)


def test_a_session_without_layers_takes_no_memory() -> None:
    cache = cache_of(0)
    session = cache.open(1000, 0)
    cache.extend(session, 1000)
    session.length = 1000
    child = cache.fork(session, 2000)
    cache.extend(child, 1)
    cache.truncate(child, 500)
    assert (cache.reserved_bytes, cache.used_bytes) == (0, 0)


def test_closing_in_any_order_gives_everything_back() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)):
        cache = cache_of(20)
        parent = filled(cache, 150)
        child = cache.fork(parent, 200)
        cache.extend(child, 1)
        sessions = [parent, child, cache.fork(child, 300)]
        for index in order:
            cache.close(sessions[index])
        assert (cache.reserved_bytes, cache.used_bytes) == (0, 0)


def test_a_fork_needs_room_in_the_budget_too() -> None:
    cache = cache_of(3)
    parent = filled(cache, 100)
    with pytest.raises(OutOfKvMemory):
        cache.fork(parent, 100)
    assert [page.users for page in parent.pages] == [1, 1]
    assert cache.reserved_bytes == 2 * PAGE_BYTES


def test_a_fork_always_has_room_for_what_it_starts_with() -> None:
    cache = cache_of(8)
    child = cache.fork(filled(cache, 130), 1)
    assert (child.length, child.reserved_pages) == (130, 3)


# ---------------------------------------------------------------- truncation


def test_truncating_keeps_the_positions_before_and_frees_the_pages_after() -> None:
    cache = cache_of(4)
    session = filled(cache, 200)
    keys, values = cache.export(session, 0, 2)
    for length in (200, 129, 128, 70, 1, 0):
        cache.truncate(session, length)
        assert cache.used_bytes == -(-length // PAGE) * PAGE_BYTES
        left = cache.export(session, 0, 2)
        assert_same_bits(left[0], keys[:, :length])
        assert_same_bits(left[1], values[:, :length])


@pytest.mark.parametrize("length", [-1, 101, 10**9])
def test_truncating_to_what_is_not_there_is_refused(length: int) -> None:
    cache = cache_of(4)
    session = filled(cache, 100)
    with pytest.raises(BadRequest):
        cache.truncate(session, length)
    assert (session.length, len(session.pages)) == (100, 2)


# ---------------------------------------------------------------- export and import


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("positions", [1, 31, 64, 65, 200])
def test_what_is_imported_is_exported_layer_by_layer(shape: KvShape, positions: int) -> None:
    layers = 3
    cache = cache_of(8, shape)
    keys, values = random_kv(shape, layers, positions)
    session = cache.open(positions, layers)
    cache.import_(session, 0, layers, keys, values)
    for first in range(layers):
        for last in range(first + 1, layers + 1):
            got = cache.export(session, first, last)
            assert_same_bits(got[0], keys[first:last], "keys")
            assert_same_bits(got[1], values[first:last], "values")


def test_layers_can_be_imported_one_after_the_other() -> None:
    cache = cache_of(8)
    keys, values = random_kv(SHAPE, 2, 100)
    session = opened(cache, 100)
    for layer in (1, 0):
        cache.import_(session, layer, layer + 1, keys[layer : layer + 1], values[layer : layer + 1])
    assert_same_bits(cache.export(session, 0, 2)[0], keys)
    assert_same_bits(cache.export(session, 0, 2)[1], values)


def test_an_empty_session_exports_nothing() -> None:
    cache = cache_of(2)
    keys, values = cache.export(opened(cache, 10), 0, 2)
    assert keys.shape == values.shape == (2, 0, 2, 24)
    assert keys.dtype == np.float16


def test_imports_that_do_not_fit_are_refused_and_change_nothing() -> None:
    cache = cache_of(4)
    keys, values = random_kv(SHAPE, 2, 70)
    session = opened(cache, 128)
    wrong = [
        (keys[:1], values),
        (keys, values[:, :69]),
        (keys.astype(np.float32), values),
        (keys, values.astype(np.float32)),
        (keys[..., :23], values[..., :23]),
        (keys[:, :, :1], values[:, :, :1]),
        (keys[0], values[0]),
        (keys.ravel(), values.ravel()),
    ]
    for bad_keys, bad_values in wrong:
        with pytest.raises(BadRequest):
            cache.import_(session, 0, 2, bad_keys, bad_values)
        assert (session.length, cache.used_bytes) == (0, 0)
    with pytest.raises(OutOfKvMemory):
        cache.import_(session, 0, 2, *random_kv(SHAPE, 2, 129))
    assert session.length == 0
    cache.import_(session, 0, 2, keys, values)
    with pytest.raises(BadRequest, match="has 70"):
        cache.import_(session, 0, 2, *random_kv(SHAPE, 2, 71))


def test_importing_into_a_fork_leaves_its_parent_alone() -> None:
    cache = cache_of(8)
    parent = filled(cache, 70, seed=1)
    before = cache.export(parent, 0, 2)
    child = cache.fork(parent, 70)
    keys, values = random_kv(SHAPE, 2, 70, seed=2)
    cache.import_(child, 0, 2, keys, values)
    assert_same_bits(cache.export(child, 0, 2)[0], keys, "child")
    assert_same_bits(cache.export(parent, 0, 2)[0], before[0], "parent's keys")
    assert_same_bits(cache.export(parent, 0, 2)[1], before[1], "parent's values")


# ---------------------------------------------------------------- sharing


def test_a_fork_shares_pages_until_one_side_writes() -> None:
    cache = cache_of(12)
    parent = filled(cache, 100, room=200)
    child = cache.fork(parent, 200)
    assert cache.used_bytes == 2 * PAGE_BYTES
    cache.extend(child, 1)
    assert cache.used_bytes == 3 * PAGE_BYTES  # only the page that is written into was copied
    assert child.pages[0] is parent.pages[0]
    assert child.pages[1] is not parent.pages[1]
    assert np.array_equal(child.pages[1].bytes, parent.pages[1].bytes)
    cache.extend(parent, 1)
    assert cache.used_bytes == 3 * PAGE_BYTES  # the parent's page is its own again


def test_a_copy_that_there_was_no_memory_for_leaves_the_page_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next try would write into the parent's page, or the child's end would free it under the parent."""
    cache = cache_of(12)
    parent = filled(cache, 100, room=200)
    before = parent.pages[1].bytes.copy()
    child = cache.fork(parent, 200)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_copy_page", no_memory)
        with pytest.raises(OutOfKvMemory):
            cache.extend(child, 1)
    assert child.pages[1] is parent.pages[1]
    assert parent.pages[1].users == 2
    cache.extend(child, 1)
    child.pages[1].bytes[:] = 255
    assert np.array_equal(parent.pages[1].bytes, before)
    cache.close(child)
    assert cache.used_bytes == 2 * PAGE_BYTES
    cache.close(parent)
    assert (cache.reserved_bytes, cache.used_bytes) == (0, 0)


def no_memory(page: object) -> None:
    raise OutOfKvMemory("the system gives no memory")


def test_pages_left_by_a_refused_batch_do_not_hinder_a_fork() -> None:
    """`extend` may be called and the step never run; the parent then has more pages than positions."""
    cache = cache_of(12)
    parent = filled(cache, 10, room=200)
    cache.extend(parent, 100)
    child = cache.fork(parent, 10)
    assert child.length == 10
    cache.close(parent)
    cache.close(child)
    assert (cache.reserved_bytes, cache.used_bytes) == (0, 0)


class Model:
    """What a cache of sessions should hold: for each session the list of what was written, position by position."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache = cache_of(24, KvShape(1, 8, False))
        self.sessions: list[tuple[KvSession, list[int]]] = []

    def step(self) -> None:
        actions = [self.open, self.fork, self.write, self.write, self.write, self.truncate, self.close]
        with contextlib.suppress(OutOfKvMemory):
            self.random.choice(actions)()
        self.check()

    def pick(self) -> tuple[KvSession, list[int]] | None:
        return self.random.choice(self.sessions) if self.sessions else None

    def open(self) -> None:
        self.sessions.append((opened(self.cache, self.random.randint(1, 300)), []))

    def fork(self) -> None:
        if (chosen := self.pick()) is not None:
            self.sessions.append((self.cache.fork(chosen[0], self.random.randint(1, 300)), list(chosen[1])))

    def write(self) -> None:
        if (chosen := self.pick()) is not None:
            session, written = chosen
            count = self.random.randint(1, 100)
            self.cache.extend(session, count)
            for position in range(session.length, session.length + count):
                mark = self.random.randint(0, 255)
                session.pages[position // PAGE].bytes[position % PAGE] = mark
                written.append(mark)
            session.length += count

    def truncate(self) -> None:
        if (chosen := self.pick()) is not None:
            length = self.random.randint(0, len(chosen[1]))
            self.cache.truncate(chosen[0], length)
            del chosen[1][length:]

    def close(self) -> None:
        if (chosen := self.pick()) is not None:
            self.cache.close(chosen[0])
            self.sessions.remove(chosen)

    def check(self) -> None:
        pages: dict[int, int] = {}
        for session, written in self.sessions:
            assert session.length == len(written)
            assert [session.pages[p // PAGE].bytes[p % PAGE] for p in range(session.length)] == written
            assert session.addresses[: len(session.pages)].tolist() == [page.address for page in session.pages]
            for page in session.pages:
                pages[page.address] = pages.get(page.address, 0) + 1
                assert page.users >= 1
        assert all(page.users == pages[page.address] for session, _ in self.sessions for page in session.pages)
        assert self.cache.used_bytes == len(pages) * self.cache.shape.page_bytes(LAYERS)
        reserved = sum(session.reserved_pages for session, _ in self.sessions)
        assert self.cache.used_bytes <= self.cache.reserved_bytes == reserved * self.cache.shape.page_bytes(LAYERS)
        assert self.cache.reserved_bytes <= self.cache.budget_bytes


@pytest.mark.parametrize("seed", range(200 if IS_LONG else 12))
def test_random_histories_keep_every_session_apart(seed: int) -> None:
    model = Model(seed)
    for _ in range(150):
        model.step()


def test_a_shrunk_session_gives_back_what_it_does_not_use_and_can_still_be_forked() -> None:
    cache = cache_of(8)
    parent = opened(cache, 6 * PAGE)
    cache.extend(parent, PAGE + 1)
    parent.length = PAGE + 1
    cache.shrink(parent)
    assert cache.reserved_bytes == 2 * PAGE_BYTES
    child = cache.fork(parent, 6 * PAGE)
    assert cache.reserved_bytes == 8 * PAGE_BYTES
    with pytest.raises(OutOfKvMemory):
        cache.extend(parent, PAGE)
    cache.extend(child, PAGE)
    cache.close(parent)
    cache.close(child)
    assert (cache.reserved_bytes, cache.used_bytes) == (0, 0)
