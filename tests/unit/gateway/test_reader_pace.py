"""Readers that are fast, slow, and just slow enough: who keeps its turn."""

import pytest

from potluck.gateway.reader_pace import ReaderPace

EVENT_BYTES = 300
BUFFER_BYTES = 48 << 10  # what a connection takes in one go when its client has read that much


def sends(pace: ReaderPace, bytes_per_s: float, buffers: int) -> bool:
    """Whether a client that reads at this rate is waited for to the end: the event that fills the buffer waits, the others do not."""
    for _ in range(buffers):
        for place in range(0, BUFFER_BYTES, EVENT_BYTES):
            if not pace.is_kept(0.0 if place else BUFFER_BYTES / bytes_per_s, EVENT_BYTES):
                return False
    return True


@pytest.mark.parametrize(("bytes_per_s", "is_kept"), [(820, False), (3500, False), (5000, True), (50_000, True)])
def test_a_reader_that_sips_is_found_out_though_no_wait_is_a_minute(bytes_per_s: float, is_kept: bool) -> None:
    pace = ReaderPace(60.0, 4096.0)
    assert sends(pace, bytes_per_s, buffers=300) == is_kept


def test_a_fast_reader_of_a_slow_answer_is_kept_however_long_it_takes() -> None:
    """A hundred bytes a minute, for a month; each sending takes what a call takes."""
    pace = ReaderPace(60.0, 4096.0)
    assert all(pace.is_kept(20e-6, 100) for _ in range(60 * 24 * 30))


def test_what_was_read_before_does_not_count_for_ever() -> None:
    pace = ReaderPace(60.0, 4096.0)
    assert sends(pace, 1e6, buffers=1000)
    assert not sends(pace, 820, buffers=3)


def test_one_long_wait_is_forgiven() -> None:
    pace = ReaderPace(60.0, 4096.0)
    assert pace.is_kept(59.0, EVENT_BYTES)
    assert sends(pace, 1e6, buffers=1000)
