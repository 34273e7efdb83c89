"""The store's commands at the terminal: what they print, and with which exit code they end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from potluck import __version__
from potluck.cli import main
from potluck.cli.console import LineProgress, format_table, one_line, shown_bytes, shown_count
from potluck.node.identity_file import own_key, own_run_file, own_swarm_file
from potluck.node.run_file import RunningNode
from potluck.trust.keeper import SwarmKeeper
from potluck.weights.store import ModelStore
from tests.support.damage import DAMAGES
from tests.support.loopback_server import LoopbackServer, stall
from tests.support.partial_models import whole_tiny
from tests.support.tiny_models import tiny_gguf

PROGRAM = (sys.executable, "-c", "from potluck.cli.main import main; main()")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "tiny.gguf").write_bytes(tiny_gguf())
    return str(tmp_path / "tiny.gguf")


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, object]:
    assert main.run([*arguments, "--json"]) == code
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    result = json.loads(output)
    assert isinstance(result, dict)
    return result


def test_pull_list_remove(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    assert main.run(["pull", tiny]) == 0
    assert "tiny is ready: llama, 2 layers" in capsys.readouterr().out
    assert main.run(["pull", tiny]) == 0
    assert "was here already" in capsys.readouterr().out
    assert main.run(["models"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["ID", "FAMILY", "LAYERS", "PARAMETERS", "SIZE", "CONTEXT", "QUANTISATION"]
    assert line.split()[:3] == ["tiny", "llama", "2"]
    assert line.split()[-2:] == ["128", "F32"]
    assert main.run(["remove", "tiny"]) == 0
    capsys.readouterr()
    assert main.run(["models"]) == 0
    assert "potluck pull smollm2-135m" in capsys.readouterr().out


def test_a_partial_model_is_listed_with_the_layers_it_holds(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path
) -> None:
    whole = whole_tiny(tmp_path / "whole")
    whole.fill(whole.empty_copy(home / "models"), ("embedding", "layer-0000"))
    assert main.run(["models"]) == 0
    assert "partial 0-0 of 2" in capsys.readouterr().out
    [model] = run_json(capsys, "models")["models"]  # type: ignore[misc]
    assert (model["format"], model["held"]) == ("partial", "0-0")
    assert main.run(["remove", "tiny"]) == 0


def test_the_same_as_json(capsys: pytest.CaptureFixture[str], tiny: str, home: Path) -> None:
    pulled = run_json(capsys, "pull", tiny, "--name", "mine")
    assert pulled["is_new"] is True
    listed = run_json(capsys, "models")
    assert listed == {"models": [pulled["model"]], "damaged": [], "folder": str(home / "models")}
    assert run_json(capsys, "remove", "mine") == {"removed": "mine"}


def test_damaged_models_are_named(capsys: pytest.CaptureFixture[str], tiny: str, home: Path) -> None:
    main.run(["pull", tiny])
    (home / "models" / "tiny" / "entry.json").write_text("{}")
    assert main.run(["models"]) == 0
    assert "potluck remove tiny" in capsys.readouterr().err
    assert run_json(capsys, "models")["damaged"] == ["tiny"]


@pytest.mark.parametrize("damage", ["truncated", "deleted", "manifest"])
def test_a_model_with_damaged_files_is_marked_and_pulled_again(
    capsys: pytest.CaptureFixture[str], tiny: str, home: Path, damage: str
) -> None:
    main.run(["pull", tiny])
    DAMAGES[damage](home / "models" / "tiny")
    capsys.readouterr()
    assert main.run(["models"]) == 0
    captured = capsys.readouterr()
    assert "damaged" in captured.out.splitlines()[1]
    assert "potluck remove tiny" in captured.err
    assert run_json(capsys, "models")["damaged"] == ["tiny"]
    assert main.run(["pull", tiny]) == 0
    assert "was here already" not in capsys.readouterr().out
    assert run_json(capsys, "models")["damaged"] == []


def test_a_broken_entry_is_not_called_an_empty_store_nor_a_model_that_was_here(
    capsys: pytest.CaptureFixture[str], tiny: str, home: Path
) -> None:
    main.run(["pull", tiny])
    (home / "models" / "tiny" / "entry.json").unlink()
    capsys.readouterr()
    assert main.run(["models"]) == 0
    assert "empty" not in capsys.readouterr().out
    assert main.run(["pull", tiny]) == 1
    assert "potluck remove tiny" in capsys.readouterr().err


def test_a_model_that_the_running_node_is_to_serve_is_not_removed(
    capsys: pytest.CaptureFixture[str], tiny: str, home: Path
) -> None:
    main.run(["pull", tiny])
    [entry] = ModelStore(home / "models").list()
    keeper = SwarmKeeper.found(own_key(), own_swarm_file(), "")
    keeper.serve_model("served", entry.weights_sha256)
    with own_run_file().held():
        own_run_file().write(RunningNode(os.getpid(), "aa", "bb", (), ""))
        capsys.readouterr()
        assert main.run(["remove", "tiny"]) == 2
        refusal = capsys.readouterr().err
        assert "potluck withdraw served" in refusal
        assert "potluck leave" in refusal
        assert main.run(["remove", "tiny", "--force"]) == 0
        main.run(["pull", tiny])
        DAMAGES["truncated"](home / "models" / "tiny")
        assert main.run(["remove", "tiny"]) == 0, "what is damaged is to be removed and pulled again"
        main.run(["pull", tiny])
        keeper.serve_model("served", entry.weights_sha256, is_served=False)
        assert main.run(["remove", "tiny"]) == 0
        keeper.serve_model("served", entry.weights_sha256)
        main.run(["pull", tiny])
    assert main.run(["remove", "tiny"]) == 0, "no node runs"


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (["pull", "nothing-like-it"], 1, "model_not_found"),
        (["pull", "hf:odd"], 2, "bad_request"),
        (["remove", "nothing"], 1, "model_not_found"),
        (["pull"], 2, "bad_request"),
        (["feast"], 2, "bad_request"),
        (["models", "--loud"], 2, "bad_request"),
        (["pull", "/nowhere/\udcff.gguf"], 2, "bad_request"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], arguments: list[str], exit_code: int, code: str) -> None:
    assert main.run(arguments) == exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.endswith(f"[{code}]\n")
    assert captured.err.count("\n") == 1
    error = run_json(capsys, *arguments, code=exit_code)["error"]
    assert isinstance(error, dict)
    assert error["code"] == code


def test_json_goes_after_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--json", "models"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "bad_request"


def test_bad_files_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"rubbish" * 10)
    assert main.run(["pull", str(tmp_path / "bad.gguf")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str], tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "file"))
    assert main.run(["pull", tiny]) == 1
    assert "error: Not a directory" in capsys.readouterr().err


def test_the_menu_and_the_version(capsys: pytest.CaptureFixture[str], tiny: str) -> None:
    main.run(["pull", tiny])
    capsys.readouterr()
    assert main.run([]) == 0
    output = capsys.readouterr().out
    assert "potluck pull" in output
    assert "tiny" in output
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"potluck {__version__}\n"
    assert run_json(capsys, "--version") == {"version": __version__}


def test_ctrl_c(home: Path) -> None:
    with LoopbackServer() as server:
        server.routes["/api/models/a/b/tree/main"] = stall(b"[]", after=1)
        environment = os.environ | {"HF_ENDPOINT": server.url, "POTLUCK_HOME": str(home)}
        # Whoever started the tests in the background has interrupts ignored, and children inherit that.
        listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        command = (PROGRAM[0], "-c", listens + PROGRAM[2], "pull", "hf:a/b", "--json")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
            assert server.was_asked.wait(10)
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(output) == {"error": {"code": "interrupted", "message": "interrupted"}}
    assert errors == b""


def test_the_program_starts_without_heavy_imports(home: Path) -> None:
    heavy = "numpy", "jinja2", "rich", "numba", "http.client"
    script = (
        "import sys; from potluck.cli.main import run; code = run(['models', '--json'])\n"
        f"print([name for name in {heavy} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run((sys.executable, "-c", script), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away(tiny: str) -> None:
    main.run(["pull", tiny])
    command = (*PROGRAM, "models")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_progress_lines_for_logs(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LineProgress(quiet_s=0.0)
    progress.start("downloading x", 1000)
    for _ in range(100):
        progress.advance(10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[4] == "downloading x: 50 % of 1.0 kB"


def test_numbers_for_people() -> None:
    assert [shown_bytes(size) for size in (0, 999, 1000, 98_362_432, 99_960_000, 10**15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "98.4 MB",
        "100.0 MB",
        "1000.0 TB",
    ]
    assert [shown_count(count) for count in (7, 1234, 134_515_008, 1_540_000_000)] == ["7", "1.2K", "135M", "1.5B"]
    assert format_table(("A", "B"), [("x", "1"), ("long", "22")], right=(1,)) == "A      B\nx      1\nlong  22"
    assert one_line("a\x1b[31m\nb") == "a [31m b"
