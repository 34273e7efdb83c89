"""Ctrl-C while nodes are being started: one line, at once, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.support.swarms import TINY, stored_tiny

_PROGRAM = "from potluck.cli.entry import main; main()"


def test_an_interrupted_local_swarm_ends_at_once_with_all_its_nodes(models_home: Path) -> None:
    stored_tiny(models_home)
    environment = os.environ | {"POTLUCK_HOME": str(models_home)}
    command = [sys.executable, "-c", _PROGRAM, "local", "--nodes", "2", "--model", TINY, "--api", "off"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "starting 2 nodes (the first start compiles kernels)\n"
        children: list[psutil.Process] = []
        limit_s = time.monotonic() + 30
        while not children and time.monotonic() < limit_s:
            children = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.01)
        assert children
        process.send_signal(signal.SIGINT)  # to it alone, as `kill -INT` does; a terminal tells the nodes too
        _, told = process.communicate(timeout=20)
    assert (process.returncode, told.splitlines()[-1]) == (130, "error: interrupted [interrupted]")
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
