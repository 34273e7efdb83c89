"""What a shard keeps of its outputs: without gaps, within a budget over all sessions, and gone with its session."""

import random

import pytest

from potluck.shard.outbox import Kept, Outbox

A, B, C = b"a", b"b", b"c"
ROW = 4


def rows(position: int, count: int) -> bytes:
    return b"".join((position + i).to_bytes(ROW, "big") for i in range(count))


def filled(budget: int = 1 << 20, *chunks: int) -> Outbox:
    outbox = Outbox(budget)
    outbox.open(A)
    position = 0
    for count in chunks:
        outbox.keep(A, position, count, rows(position, count))
        position += count
    return outbox


def test_nothing_is_kept_for_a_session_that_was_not_opened() -> None:
    outbox = Outbox(100)
    outbox.keep(A, 0, 1, rows(0, 1))
    assert (outbox.used_bytes, outbox.holds(A, 0), list(outbox.pieces(A, 0, 9, 9, ROW))) == (0, False, [])


@pytest.mark.parametrize(("length", "is_held"), [(0, True), (1, True), (7, True), (8, False)])
def test_it_knows_how_far_it_reaches(length: int, is_held: bool) -> None:
    assert filled(1 << 20, 3, 4).holds(A, length) is is_held


def test_an_open_session_without_outputs_holds_nothing_but_length_nought() -> None:
    assert filled(100).holds(A, 0)
    assert not filled(100).holds(A, 1)


@pytest.mark.parametrize("length", range(0, 9))
def test_a_truncation_cuts_through_the_piece_that_straddles_it(length: int) -> None:
    outbox = filled(1 << 20, 3, 1, 4)
    outbox.truncate(A, length, ROW)
    assert outbox.used_bytes == length * ROW
    assert b"".join(p.body for p in outbox.pieces(A, 0, 8, 100, ROW)) == rows(0, length)
    outbox.keep(A, length, 2, rows(length, 2))
    assert outbox.holds(A, length + 2)


def test_pieces_are_joined_up_to_a_number_of_rows() -> None:
    outbox = filled(1 << 20, 1, 1, 1, 1, 1)
    assert [(p.position, p.count) for p in outbox.pieces(A, 0, 5, 2, ROW)] == [(0, 2), (2, 2), (4, 1)]


def test_pieces_are_cut_so_that_there_are_never_more_than_it_takes() -> None:
    """Whoever is sent them has room for so many: chunks a little longer than half a piece must not go out one by one."""
    assert [(p.position, p.count) for p in filled(1 << 20, 9, 1).pieces(A, 0, 10, 4, ROW)] == [(0, 4), (4, 4), (8, 2)]
    assert [(p.position, p.count) for p in filled(1 << 20, 3, 3, 3).pieces(A, 1, 9, 4, ROW)] == [(1, 4), (5, 4)]


@pytest.mark.parametrize("seed", range(20))
def test_any_part_comes_out_as_it_went_in(seed: int) -> None:
    draw = random.Random(seed)
    chunks = [draw.randint(1, 5) for _ in range(draw.randint(1, 8))]
    outbox, total = filled(1 << 20, *chunks), sum(chunks)
    start, stop = sorted((draw.randint(0, total), draw.randint(0, total)))
    pieces = list(outbox.pieces(A, start, stop, draw.randint(1, 6), ROW))
    assert b"".join(piece.body for piece in pieces) == rows(start, stop - start)
    position = start
    for piece in pieces:
        assert piece == Kept(position, len(piece.body) // ROW, piece.body)
        position += piece.count


def test_over_budget_the_session_that_wrote_least_recently_loses_all_it_had() -> None:
    outbox = Outbox(10 * ROW)
    for session in (A, B, C):
        outbox.open(session)
    outbox.keep(A, 0, 4, rows(0, 4))
    outbox.keep(B, 0, 4, rows(0, 4))
    outbox.keep(A, 4, 1, rows(4, 1))
    outbox.keep(C, 0, 2, rows(0, 2))
    assert [outbox.holds(session, 0) for session in (A, B, C)] == [True, False, True]
    assert outbox.used_bytes == 7 * ROW
    outbox.keep(B, 4, 1, rows(4, 1))  # with a hole before it, it would be of no use
    assert outbox.used_bytes == 7 * ROW


def test_a_session_larger_than_the_budget_loses_its_own() -> None:
    outbox = filled(3 * ROW, 2, 2)
    assert (outbox.used_bytes, outbox.holds(A, 0)) == (0, False)


def test_it_is_empty_when_the_sessions_are_closed() -> None:
    outbox = filled(1 << 20, 3, 4)
    outbox.open(B)
    outbox.keep(B, 0, 1, rows(0, 1))
    outbox.close(A)
    outbox.close(A)
    outbox.close(B)
    assert outbox.used_bytes == 0
    assert not outbox.holds(A, 0)
