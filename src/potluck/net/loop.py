"""The event loop that Potluck runs on: uvloop where it exists, which halves the cost of a hop, asyncio's own elsewhere."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, on the loop of our choice."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main)
