"""Prompts, answers, tokens and activations never reach a log or a metric: real processes that log all they can, one of them killed."""

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from potluck.core.sampling_params import SamplingParams
from potluck.testing.local_swarm import LocalHead, LocalProcess
from potluck.weights.store import ModelStore
from potluck.worker.local_model import LocalModel
from tests.support.swarms import TINY, stored_tiny

MARKER = "zyxquorvith"
PROMPT = f"tell me of the {MARKER} please"
COUNT = 200
SAMPLED = SamplingParams(temperature=0.8, seed=5)
LAYERS = (["--layers", "0-3"], ["--layers", "4-7"], ["--layers", "0-output", "--spare"])
LOUD = "a process that logs everything"
# There is no switch for it: Python runs this at the start of each process that has its folder on its path, workers too.
SITE = f"import logging\nlogging.basicConfig(level=logging.DEBUG)\nlogging.debug({LOUD!r})\n"
ACTIVATIONS = re.compile(r"(?:-?\d+\.\d+(?:e[-+]?\d+)?[\s,]+){6}")
IN_A_ROW = 4  # of a text's tokens; fewer could be any figures


@pytest.fixture
def processes(models_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LocalProcess]]:
    """Two halves of a tiny model, a spare, and a head with an API; each with its log in `tmp_path`."""
    stored_tiny(models_home)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    common = ["--model", TINY, "--listen", "127.0.0.1:0", "--threads", "1", "--api", "off", "--metrics", "127.0.0.1:0"]
    with contextlib.ExitStack() as ended:
        started: list[LocalProcess] = []
        for number, layers in enumerate(LAYERS):
            started.append(LocalProcess([*common, *layers], tmp_path, f"node-{number}", models_home))
            ended.callback(started[-1].end)
        for node in started:
            node.wait_until_serving()
        head = LocalHead([node.address for node in started], "127.0.0.1:0", tmp_path, models_home)
        ended.callback(head.end)
        head.wait_until_serving()
        yield [*started, head]


def unsplit(home: Path) -> tuple[list[int], list[int], str]:
    """The prompt's tokens, the answer's, and its text."""
    entry, store = stored_tiny(home), ModelStore(home / "models")
    model = LocalModel(store.open(TINY), source=entry.weights_sha256, cache_folder=store.packed_folder(TINY), threads=1)
    prompt = model.tokenizer.encode(PROMPT, parse_special=False)
    pieces = list(model.generate(prompt, SAMPLED, COUNT))
    model.close()
    return list(prompt), [p.chosen.token for p in pieces if p.chosen is not None], "".join(p.text for p in pieces)


def asked(head: LocalHead, victim: LocalProcess) -> tuple[str, set[str]]:
    """The answer's text and the names of the events beside it. The victim's worker is killed after some tokens."""
    assert victim.announcement is not None
    text, events = "", set()
    fields = {"model": TINY, "prompt": PROMPT, "max_tokens": COUNT, "temperature": 0.8, "seed": 5, "stream": True}
    headers = {"x-potluck-diagnostics": "events"}
    chunks = 0
    with httpx.stream("POST", f"{head.url}/v1/completions", json=fields, headers=headers, timeout=60.0) as stream:
        for line in stream.iter_lines():
            events |= {line[7:]} if line.startswith("event: ") else set()
            said = json.loads(line[6:]) if line.startswith("data: {") else {}
            if said.get("choices"):
                text += said["choices"][0]["text"]
                chunks += 1
                if chunks == 5:
                    os.kill(victim.announcement.worker_pid, signal.SIGKILL)
    return text, events


def run_of(tokens: Sequence[int]) -> re.Pattern[str]:
    """Any few tokens in a row, in decimal, however they are set apart."""
    windows = {tuple(tokens[at : at + IN_A_ROW]) for at in range(len(tokens) - IN_A_ROW + 1)}
    return re.compile("|".join(rf"\b{r'[^0-9]{1,3}'.join(map(str, window))}\b" for window in windows))


def leaks(page: str, prompt: Sequence[int], answer: Sequence[int], text: str) -> list[str]:
    """What of a conversation stands on a page."""
    found = [MARKER] if MARKER in page else []
    found += sorted(word for word in set(re.findall(r"word\d+", text)) if re.search(rf"\b{word}\b", page))
    for pattern in (run_of(prompt), run_of(answer), ACTIVATIONS):
        found += [match.group() for match in pattern.finditer(page)][:3]
    return found


def test_prompts_answers_tokens_and_activations_never_reach_a_log_or_a_metric(
    processes: list[LocalProcess], models_home: Path, tmp_path: Path
) -> None:
    prompt, answer, expected = unsplit(models_home)
    *nodes, head = processes
    assert isinstance(head, LocalHead)
    text, events = asked(head, nodes[0])
    assert text.lstrip() == expected  # a completion begins with the space between it and its prompt
    assert any("failover" in event for event in events), events
    logs = {path.name: path.read_text(errors="replace") for path in sorted(tmp_path.glob("*.log"))}
    pages = {f"metrics of {name}": page_named_in(log) for name, log in logs.items() if name.startswith("node")}
    pages["metrics of the head"] = httpx.get(f"{head.url}/metrics").text

    assert len(logs) == len(pages) == len(processes)
    assert [log.count(LOUD) >= 2 for name, log in logs.items() if name.startswith("node")] == [True] * len(nodes)
    assert LOUD in logs["head.log"]
    assert "lost the worker" in logs["node-0.log"]  # the failover was logged, and counted:
    assert re.search(
        r"^distributed_inference_\S*failover\S*_total\S* 1\.0$", pages["metrics of the head"], re.MULTILINE
    )
    told = {name: leaks(page, prompt, answer, text) for name, page in {**logs, **pages}.items()}
    assert {name: found for name, found in told.items() if found} == {}


def page_named_in(log: str) -> str:
    found = re.search(r"metrics at (http://\S+)", log)
    assert found is not None
    return httpx.get(found.group(1)).text


def test_what_is_looked_for_would_be_found() -> None:
    prompt, answer = [1, 229, 153, 132, 119, 104], [430, 164, 123, 479, 478]
    text = "word171 word220\x17T"
    for page in (
        f"DEBUG:x:asked for {PROMPT!r}",
        "INFO:x:prompt=(1, 229, 153, 132, 119)",
        'metric{tokens="164 123 479 478"} 1.0',
        "said ' word220'",
        "rows [0.125, -3.5e-05, 1.0, 2.0, 7.25, 0.5, 1.5]",
    ):
        assert leaks(page, prompt, answer, text), page
    for page in (
        'ms_bucket{le="1.0"} 3.0\nms_bucket{le="2.5"} 4.0\n',
        "lost the worker of m: killed; next try in 0.1 s",
        "words 430 164",
    ):
        assert leaks(page, prompt, answer, text) == [], page
