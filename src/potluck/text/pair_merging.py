"""Byte-pair merging of one word, whatever decides which pair goes first. Knows no vocabulary and no text format.

A heap keeps it at O(n log n): a "word" of 100,000 characters is a legal prompt.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

PairPriority = Callable[[str, str], float | None]


def merge_pairs(symbols: list[str], priority_of: PairPriority) -> list[str]:
    """Merges neighbours, lowest priority first and leftmost first among equals, until no pair has a priority."""
    if len(symbols) < 2:
        return symbols
    symbols = list(symbols)
    following = [*range(1, len(symbols)), -1]
    preceding = list(range(-1, len(symbols) - 1))
    queue = _first_pairs(symbols, priority_of)
    while queue:
        _, left, length = heappop(queue)
        right = following[left]
        # A pair is stale once either side has grown or gone; equal length from the same start means the same pair.
        if right < 0 or not symbols[left] or len(symbols[left]) + len(symbols[right]) != length:
            continue
        symbols[left] += symbols[right]
        symbols[right] = ""
        after = following[left] = following[right]
        if after >= 0:
            preceding[after] = left
            _offer(queue, symbols, left, after, priority_of)
        before = preceding[left]
        if before >= 0:
            _offer(queue, symbols, before, left, priority_of)
    return [symbol for symbol in symbols if symbol]


def _first_pairs(symbols: list[str], priority_of: PairPriority) -> list[tuple[float, int, int]]:
    queue = []
    for left in range(len(symbols) - 1):
        priority = priority_of(symbols[left], symbols[left + 1])
        if priority is not None:
            queue.append((priority, left, len(symbols[left]) + len(symbols[left + 1])))
    heapify(queue)
    return queue


def _offer(
    queue: list[tuple[float, int, int]], symbols: list[str], left: int, right: int, priority_of: PairPriority
) -> None:
    priority = priority_of(symbols[left], symbols[right])
    if priority is not None:
        heappush(queue, (priority, left, len(symbols[left]) + len(symbols[right])))
