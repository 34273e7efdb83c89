"""Tells the daemon that this process lives, and notices that the daemon does not, also while the worker computes.

A thread of its own on a stream of its own: it sleeps until it is asked, and is asked only where an answer takes long. A thread that
looked from time to time whether it is asked would push the daemon or another worker to the wrong core while a token is on its way.
"""

import contextlib
import socket
import threading

from potluck.worker.host_process import end

_READ_BYTES = 64


def start_pulse(stream: socket.socket) -> None:
    """Whatever comes goes back; kernels release the GIL meanwhile. The stream's end is the end of the process."""
    threading.Thread(target=_answer, args=(stream,), name="potluck-pulse", daemon=True).start()


def _answer(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):  # what a killed daemon's end may look like
        while asked := stream.recv(_READ_BYTES):
            stream.sendall(asked)
    end(0)
