"""The worker process: `python -m potluck.worker.process --fd N --pulse-fd N --settings JSON`, started by a daemon's supervisor.

It has two inherited sockets to that daemon and the paths of a model: no keys, no network. It ends when they close.
"""

import argparse
import errno
import faulthandler
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from potluck.core.core_dumps import forbid_core_dumps
from potluck.wire.work import Attend, Rehearse, RunBatch
from potluck.wire.worker_settings import OUT_OF_MEMORY_STATUS, WorkerSettings
from potluck.worker.attention import Attention
from potluck.worker.channel import Channel
from potluck.worker.host_process import die_with_parent, end, leave_interrupts_to_parent
from potluck.worker.pulse import start_pulse

_FAILED = 70  # exit status: a bug of ours


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    leave_interrupts_to_parent()
    die_with_parent()
    forbid_core_dumps()
    faulthandler.enable()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--pulse-fd", type=int, required=True)
    parser.add_argument("--settings", type=WorkerSettings.decode, required=True)
    options = parser.parse_args(arguments)
    start_pulse(socket.socket(fileno=options.pulse_fd))  # first: it answers while the engine is imported, too
    channel = Channel(socket.socket(fileno=options.fd), options.settings.spin_s)
    try:
        serve(channel, options.settings)
    except Exception as error:
        _report(error)
        end(exit_status(error))
    end(0)


def serve(channel: Channel, settings: WorkerSettings) -> None:
    """Handles messages in order until the last stage is unloaded."""
    if settings.device == "cpu":
        _hide_what_no_kernel_uses()
    from potluck.worker.worker import Worker

    worker = Worker(settings, notice=lambda text: print(f"worker: {text}", file=sys.stderr, flush=True))
    attention = Attention(channel)
    while not worker.is_finished:
        message, body = channel.receive()
        for answer, parts in worker.handle(message, body):
            channel.send(answer, *parts)
        channel.give_way_where_few()  # what follows can wait
        if isinstance(message, Rehearse):
            channel.stay_awake(settings.awake_s)
        if isinstance(message, Attend):
            attention.attend(message.look_s)
        if isinstance(message, RunBatch):
            attention.note(*worker.times_of_batch)
        if isinstance(message, RunBatch) and not channel.has_more:
            if (next_batch := worker.look_ahead()) is not None:
                channel.expect(next_batch, sum(item.size_bytes for item in next_batch.items))
            if settings.spin_s:
                channel.call_when_idle(worker.others_turn_s, worker.claim_device)


def exit_status(error: Exception) -> int:
    """Tells a machine that is too small from a bug: the next worker is given less then."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return OUT_OF_MEMORY_STATUS
    # torch's; by its name, because only a worker with a GPU has loaded torch
    is_devices = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return OUT_OF_MEMORY_STATUS if is_devices else _FAILED


def _hide_what_no_kernel_uses() -> None:
    """Where these are installed numba loads them, for linear algebra and foreign functions: a fifth of the start, and megabytes."""
    for name in ("scipy", "cffi"):
        sys.modules[name] = None  # type: ignore[assignment]


def _report(error: Exception) -> None:
    """Where it happened, and what kind of error; not its text, which might quote what was being computed."""
    traceback.print_tb(error.__traceback__)
    print(f"worker: {type(error).__qualname__}; see above", file=sys.stderr)


if __name__ == "__main__":
    main()
