"""The process behind every command leaves no core file: a node's holds prompts, answers and its key."""

import subprocess
import sys

import pytest

SHOWS_LIMIT = """
import resource, sys
from potluck.cli import main
main.run = lambda arguments: print(resource.getrlimit(resource.RLIMIT_CORE))
from potluck.cli.entry import main as entry
resource.setrlimit(resource.RLIMIT_CORE, (4096, resource.getrlimit(resource.RLIMIT_CORE)[1]))
entry()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are Unix's")
def test_a_commands_process_leaves_no_core_file() -> None:
    shown = subprocess.run([sys.executable, "-c", SHOWS_LIMIT], capture_output=True, text=True, check=True).stdout
    assert shown == "(0, 0)\n"


def test_the_package_is_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "potluck", "--help"], capture_output=True, text=True, check=True
    ).stdout
    script = subprocess.run(
        [sys.executable, "-c", "from potluck.cli.entry import main; main()", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage" in shown
    assert shown == script.stdout
