"""Shell completion: a script for each shell, commands completed, and nothing of it in the help text."""

import os
import subprocess
import sys

import pytest

from potluck.cli import main
from potluck.cli.completion import VARIABLE


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_that_asks_this_program(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main.run(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"{VARIABLE}=complete_{shell}" in script
    assert "potluck" in script


def test_commands_and_options_are_completed() -> None:
    def complete(*words: str) -> str:
        asked = {VARIABLE: "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
        done = subprocess.run(
            (sys.executable, "-m", "potluck.cli.main"), env=os.environ | asked, capture_output=True, text=True, check=False
        )  # fmt: skip
        return done.stdout

    assert complete("potluck", "doc").split() == ["doctor"]
    assert "--quick" in complete("potluck", "doctor", "--q")


def test_the_help_text_has_none_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    assert "-completion" not in capsys.readouterr().out
