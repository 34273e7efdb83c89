"""When a link takes what arrives for the step that it expects. Bytes are delivered by hand."""

import contextlib

import pytest

from potluck.core.errors import ProtocolViolation
from potluck.net.memory import MemoryLink, MemoryNetwork
from potluck.wire.foreseen import ForeseenStep
from potluck.wire.frame_writer import FrameWriter
from tests.support.link_ends import ACCEPTER, DIALER, Recorder, run_test
from tests.support.wire_messages import step


@pytest.mark.parametrize("begun", ["chunk", "part of a frame", "part of a header"])
def test_inside_another_message_no_step_is_foreseen(begun: str) -> None:
    """Or whoever sends could hide the step's bytes in there, and what leaves early would never be decided."""

    async def main() -> None:
        told: list[bytes] = []
        handler = Recorder()
        link = MemoryLink(MemoryNetwork(), ACCEPTER.node_id, DIALER.node_id, handler)
        writer = FrameWriter()
        writer.push(step(2), bytes(3 << 20))
        frames = list(iter(lambda: b"".join(writer.take_frame()), b""))
        foreseen = ForeseenStep(step(1, 7), 1, 4)
        frame = foreseen.frame(step().spent, b"body")
        first = {"chunk": frames[0], "part of a frame": frames[0][:-50], "part of a header": frames[0][:9]}[begun]
        link.deliver(first)
        link.foresee(foreseen, told.append)
        if begun == "chunk":
            link.deliver(frame)
            assert handler.received == [(step(1, 7), b"body")]
        else:
            with contextlib.suppress(ProtocolViolation):
                link.deliver(frame)
            assert handler.received == []
        assert told == []
        link.abort()

    run_test(main())


def test_between_messages_it_is() -> None:
    async def main() -> None:
        told: list[bytes] = []
        handler = Recorder()
        link = MemoryLink(MemoryNetwork(), ACCEPTER.node_id, DIALER.node_id, handler)
        foreseen = ForeseenStep(step(1, 7), 1, 4)
        link.foresee(foreseen, told.append)
        link.deliver(foreseen.frame(step().spent, b"body"))
        assert told == [b"body"]
        assert handler.received == [(step(1, 7), b"body")]
        link.abort()

    run_test(main())
