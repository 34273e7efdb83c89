"""Links between real processes: a process that dies is noticed at once, one that is stopped holds nobody up but its own writers."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from potluck.net.link import Link, admit_anyone
from potluck.net.tcp import TcpTransport
from potluck.net.tls import TlsTransport
from tests.support.link_ends import ACCEPTER, DIALER, PATIENCE_S, Recorder, run_test
from tests.support.wire_messages import step

TRANSPORTS: dict[str, type[TcpTransport]] = {"tcp": TcpTransport, "tls": TlsTransport}

ECHO = """
import asyncio, sys
from potluck.net.loop import run
from tests.cluster.test_links import TRANSPORTS
from tests.support.link_ends import ACCEPTER
from potluck.net.link import admit_anyone

class Echo:
    def on_message(self, link, message, body):
        link.send(message, body)
    def on_lost(self, link, reason):
        pass

async def main():
    listener = await TRANSPORTS[sys.argv[1]](ACCEPTER, admit_anyone).listen("127.0.0.1:0", Echo())
    print(listener.address, flush=True)
    await asyncio.Event().wait()

run(main())
"""


@asynccontextmanager
async def linked(kind: str) -> AsyncIterator[tuple[Link, Recorder, int]]:
    """A link to an echoing process, its handler, the process's id. The process is gone afterwards."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", ECHO, kind, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        recorder = Recorder()
        link = await TRANSPORTS[kind](DIALER, admit_anyone).dial(address, ACCEPTER.node_id, recorder, PATIENCE_S)
        link.send(step(1), b"hello")
        await recorder.until_count(1)
        yield link, recorder, process.pid
        link.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("kind", TRANSPORTS)
@pytest.mark.parametrize("queued_bytes", [0, 30 << 20])
def test_killed_process_is_noticed_at_once(kind: str, queued_bytes: int) -> None:
    async def main() -> None:
        async with linked(kind) as (link, recorder, pid):
            if queued_bytes:
                link.send(step(2), bytes(queued_bytes))
                await asyncio.sleep(0.01)
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            await recorder.until(lambda recorder: bool(recorder.lost))
            assert time.perf_counter() - start < 1.0  # milliseconds, on a machine that is not busy
            assert len(recorder.lost) == 1

    run_test(main())


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_stopped_process_loses_nothing(kind: str) -> None:
    async def main() -> None:
        async with linked(kind) as (link, recorder, pid):
            os.kill(pid, signal.SIGSTOP)
            for position in range(20):
                link.send(step(2, position), bytes(1 << 20))
            await asyncio.sleep(0.3)
            assert recorder.lost == []
            assert link.queued_bytes > 5 << 20
            os.kill(pid, signal.SIGCONT)
            await recorder.until_count(21)
            assert recorder.messages[1:] == [step(2, position) for position in range(20)]

    run_test(main())
