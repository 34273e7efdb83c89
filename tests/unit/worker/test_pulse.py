"""What a worker answers beside its work. In a process of its own: its daemon's end is the process's end."""

import socket
import subprocess
import sys

COMPUTING = """
import socket, sys, time
from potluck.worker.pulse import start_pulse

start_pulse(socket.socket(fileno=int(sys.argv[1])))
until = time.monotonic() + 60
while time.monotonic() < until:  # Python that never waits
    pass
sys.exit(3)
"""


def test_whatever_is_asked_comes_back_while_the_main_thread_is_busy_until_the_daemon_is_gone() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", COMPUTING, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as worker:
        theirs.close()
        ours.settimeout(30)
        for question in (b"?", b"??", b"?"):
            ours.sendall(question)
            answer = b""
            while len(answer) < len(question):
                answer += ours.recv(8)
            assert answer == question
        ours.close()
        assert worker.wait(timeout=30) == 0
