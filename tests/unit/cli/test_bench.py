"""`potluck bench engine` at the terminal: its arguments and its table; nothing is measured."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from potluck.bench.report import Line, lines
from potluck.cli import main
from potluck.cli.bench import model_file, parse_threads, print_report, report_table, shown, table_row
from potluck.core.errors import BadRequest
from tests.support.bench_reports import figures, report


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_threads() -> None:
    assert parse_threads("1,2") == (1, 2)
    assert parse_threads(" 4, 1,4") == (1, 4)
    for text in ("", "0", "1,,2", "two", "-1", "999"):
        with pytest.raises(BadRequest, match="--threads takes numbers"):
            parse_threads(text)


def test_weights_need_somebody_honest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["bench", "weights", "--sources", "2", "--liars", "2", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "bad_request"


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["--against", "vllm"], 2, "bad_request"),
        (["--threads", "many"], 2, "bad_request"),
        ([], 1, "model_not_found"),
        (["--model", "./nowhere.gguf"], 1, "model_not_found"),
    ],
)
def test_what_cannot_be_measured(
    arguments: list[str], code: int, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["bench", "engine", *arguments, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["error"]["code"] == error


def test_paths_are_told_from_ids(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"content")
    assert model_file(str(tmp_path / "a.gguf"), tmp_path).path == tmp_path / "a.gguf"


def row_of(key: str, found: list[Line]) -> tuple[str, ...]:
    return table_row(next(line for line in found if line.bar.key == key))


def test_rows() -> None:
    found = lines(report({1: figures(decode=150.0)}, two_threads=40.0))
    assert row_of("decode", found) == ("decode", "1", "150 tokens/s", "100", "1.50", "≥ 1.6", "no", "")
    assert row_of("verify4", found)[2:7] == ("15.0 ms", "10.0", "1.50", "≤ 1.9", "yes")
    assert row_of("q4_0_1_5b_decode", found)[-1] == "800 MB a token, 10.4 of 12.0 GB/s"
    assert row_of("busy_core", found)[1:] == (
        "",
        "40.0 tokens/s",
        "50.0",
        "0.80",
        "≥ 1.0",
        "no",
        "engine was there first; ±0.0% over 1 pairs of rounds",
    )


def test_alone_there_is_nothing_to_compare_with() -> None:
    found = lines(report({1: figures(theirs=False)}))
    assert row_of("prefill", found)[2:] == ("300 tokens/s", "", "", "", "", "")


def test_colour_on_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    slow = report({1: figures(decode=150.0)})
    print_report(slow)
    assert "\x1b" not in capsys.readouterr().out
    console = Console(force_terminal=True, width=160, color_system="standard")
    with console.capture() as capture:
        console.print(report_table(slow))
    assert "\x1b[31m" in capture.get()


def test_no_line_is_cut_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(report())
    output = capsys.readouterr().out
    assert "a processor, 2 cores, avx2 kernels" in output
    assert "800 MB a token, 10.4 of 12.0 GB/s" in output


def test_shown() -> None:
    assert [shown(value) for value in (1234.5, 99.96, 12.34, 1.234)] == ["1234", "100.0", "12.3", "1.23"]
