"""What a worker does while it waits for its next message. In a process of its own: a channel ends its process with its stream."""

import subprocess
import sys

import pytest

WAITING = """
import socket, sys, threading, time
from potluck.wire.messages import Stage
from potluck.wire.work import Unload
from potluck.wire.work_frames import encode
from potluck.worker.channel import Channel

spin_s, after_s, message_after_s = map(float, sys.argv[1:])
ours, theirs = socket.socketpair()
channel, calls = Channel(ours, spin_s), []
send = lambda: theirs.sendall(b"".join(encode(Unload(Stage(0, 1, False, False)))))
channel.call_when_idle(after_s, lambda: calls.append(time.monotonic()))
timer = threading.Timer(message_after_s, send) if message_after_s else send()
timer and timer.start()
channel.receive()
print(len(calls))
"""


@pytest.mark.parametrize(
    ("spin_s", "after_s", "message_after_s", "calls"),
    [
        (5.0, 0.001, 0.2, 1),  # it looks for the message, and is idle meanwhile
        (5.0, 0.001, 0.0, 0),  # the message is there already
        (5.0, 60.0, 0.2, 0),  # it comes before
        (0.0, 0.001, 0.2, 0),  # this one sleeps
    ],
)
def test_an_idle_worker_that_is_awake_does_once_what_it_was_told(
    spin_s: float, after_s: float, message_after_s: float, calls: int
) -> None:
    arguments = [str(spin_s), str(after_s), str(message_after_s)]
    run = subprocess.run(
        [sys.executable, "-c", WAITING, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == f"{calls}\n"


LOOKING = """
import socket, sys, threading, time
from potluck.core.processors import CROWD
from potluck.wire.messages import Stage
from potluck.wire.work import Unload
from potluck.wire.work_frames import encode
from potluck.worker.channel import Channel

is_crowded, look_s, *messages_after_s = map(float, sys.argv[1:])
ours, theirs = socket.socketpair()
channel, was_awake = Channel(ours), []
send = lambda: theirs.sendall(b"".join(encode(Unload(Stage(0, 1, False, False)))))
channel.look_for(look_s)
if is_crowded:
    CROWD._avoidance.begin()
for after_s in messages_after_s:
    channel.call_when_idle(0.001, lambda: was_awake.append(after_s))  # called where it looks, not where it sleeps
    threading.Timer(after_s, send).start()
    channel.receive()
print(*was_awake)
"""


@pytest.mark.parametrize(
    ("is_crowded", "look_s", "messages_after_s", "was_awake"),
    [
        (0, 30.0, [0.2, 0.21, 0.22], [0.21, 0.22]),  # each came as soon as to be looked for the next time
        (0, 0.01, [0.2, 0.3, 0.4], []),  # none did
        (0, 0.0, [0.2, 0.21], []),
        (1, 30.0, [0.2, 0.21, 0.22], []),  # somebody else wants the core
    ],
)
def test_what_came_soon_is_looked_for_the_next_time(
    is_crowded: int, look_s: float, messages_after_s: list[float], was_awake: list[float]
) -> None:
    arguments = [str(each) for each in (is_crowded, look_s, *messages_after_s)]
    run = subprocess.run(
        [sys.executable, "-c", LOOKING, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert [float(each) for each in run.stdout.split()] == was_awake


EXPECTING = """
import socket, sys
from potluck.wire.work import Rehearse, RunBatch, WorkItem
from potluck.wire.work_frames import encode
from potluck.worker.channel import Channel

ours, theirs = socket.socketpair()
channel = Channel(ours)
item = WorkItem(bytes(16), 5, 1, "fp32", None, True, 4)
expected, other = RunBatch(7, (item,)), RunBatch(8, (item,))
channel.expect(expected, 4)
for message in (Rehearse(item), expected, expected, other):
    theirs.sendall(b"".join(encode(message, b"body")))
    received, body = channel.receive()
    print(received is expected, received == message, body)
"""


def test_the_batch_that_is_expected_comes_as_it_would_and_is_not_decoded() -> None:
    """A rehearsal before it changes nothing; afterwards it is a batch like any."""
    run = subprocess.run([sys.executable, "-c", EXPECTING], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines() == [
        "False True b'body'",
        "True True b'body'",
        "False True b'body'",
        "False True b'body'",
    ]
