"""Grammars and the prompt's logprobs through the API: pydantic schemas, tools that must be called, lm-eval, and a shard that dies."""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from potluck.net.loop import run
from potluck.testing.local_swarm import LocalSwarm, NodePlan, split_plan

MODEL = "smollm2-135m"
QUESTION = [{"role": "user", "content": "Name a dish and how many guests it feeds, as JSON."}]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": {
        "type": "object", "properties": {key: {"type": kind}}, "required": [key], "additionalProperties": False}}}
    for name, key, kind in (("get_weather", "city", "string"), ("add_guests", "count", "integer"))
]  # fmt: skip
ITEMS = [
    {"question": "The capital of France is", "choices": [" Paris", " a banana"], "answer": 0},
    {"question": "Two plus two is", "choices": [" seven", " four"], "answer": 1},
    {"question": "A cat says", "choices": [" meow", " moo"], "answer": 0},
    {"question": "The sky is usually", "choices": [" green", " blue"], "answer": 1},
]


class Dish(BaseModel):
    name: str
    guests: int
    season: Literal["summer", "winter"]


@pytest.fixture(scope="module")
def swarm(models_home: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(MODEL, split_plan(30, 2, 1), models_home) as swarm:
        swarm.start_api()
        yield swarm


@pytest.fixture(scope="module")
def url(swarm: LocalSwarm) -> str:
    assert swarm.head is not None
    return f"{swarm.head.url}/v1"


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_an_answer_is_parsed_with_a_pydantic_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, temperature=1.5, seed=4, max_tokens=200, response_format=Dish
    )
    assert isinstance(answer.choices[0].message.parsed, Dish)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add_guests"}}])
def test_a_call_that_must_be_made_is_made(client: openai.OpenAI, choice: Any) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, temperature=1.2, seed=5, max_tokens=100, tools=TOOLS, tool_choice=choice
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls
    call = final.message.tool_calls[0].function
    key, kind = {"get_weather": ("city", str), "add_guests": ("count", int)}[call.name]
    assert isinstance(json.loads(call.arguments)[key], kind)


def test_a_schema_that_is_none_is_refused(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=schema)
    assert refused.value.code == "bad_grammar"


def _score(url: str, folder: Path) -> Any:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    data = folder / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    (folder / "potluck_task.yaml").write_text(
        f"task: potluck_task\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        "output_type: multiple_choice\ndoc_to_text: question\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "target_delimiter: ''\nmetric_list:\n  - metric: acc\n  - metric: acc_norm\n"
    )
    result = simple_evaluate(
        model="local-completions", model_args={"base_url": f"{url}/completions", "model": MODEL, "num_concurrent": 1},
        tasks=["potluck_task"], task_manager=TaskManager(include_path=str(folder), include_defaults=False), batch_size=4, bootstrap_iters=0,
    )  # fmt: skip
    likelihoods = [sample["resps"] for sample in result["samples"]["potluck_task"]]
    return result["results"]["potluck_task"]["acc,none"], likelihoods


def test_lm_eval_scores_the_split_model_as_the_unsplit_one(url: str, models_home: Path, tmp_path: Path) -> None:
    with LocalSwarm(MODEL, [NodePlan(None)], models_home) as single:
        unsplit = _score(f"{single.start_api().url}/v1", tmp_path)
    accuracy, likelihoods = _score(url, tmp_path)
    assert accuracy >= 0.5
    assert (accuracy, likelihoods) == unsplit


def test_a_prompt_is_scored_without_an_answer_as_with_one(client: openai.OpenAI) -> None:
    with_one, without = (
        client.completions.create(model=MODEL, prompt=ITEMS[0]["question"], max_tokens=limit, echo=True, logprobs=2)
        for limit in (1, 0)
    )
    assert (without.choices[0].text, without.choices[0].finish_reason) == (ITEMS[0]["question"], "length")
    scores, more = without.choices[0].logprobs, with_one.choices[0].logprobs
    assert scores is not None
    assert more is not None
    assert scores.token_logprobs == more.token_logprobs[:-1]
    assert scores.top_logprobs == more.top_logprobs[:-1]
    assert len(scores.tokens) == without.usage.prompt_tokens


def test_a_shard_killed_under_constrained_answers_changes_nothing(swarm: LocalSwarm, url: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "dish", "schema": Dish.model_json_schema()}}
    variants: list[dict[str, Any]] = [
        {"response_format": schema, "temperature": 1.5, "seed": 8},
        {"tools": TOOLS, "tool_choice": "required", "temperature": 1.5, "seed": 9},
        {"response_format": {"type": "json_object"}, "temperature": 1.2, "seed": 10, "n": 2},
    ]

    async def told(client: openai.AsyncOpenAI, fields: dict[str, Any], begun: asyncio.Event) -> list[Any]:
        chunks = []
        stream = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=60, stream=True, **fields
        )
        async for chunk in stream:
            for choice in chunk.choices:
                calls = [(c.index, c.function.arguments) for c in choice.delta.tool_calls or () if c.function]
                chunks.append((choice.index, choice.delta.content, calls, choice.finish_reason))
            if len(chunks) > 4:
                begun.set()
        begun.set()
        return sorted(chunks, key=lambda chunk: chunk[0])

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            undisturbed = [await told(client, fields, asyncio.Event()) for fields in variants]
            events = [asyncio.Event() for _ in variants]
            tasks = [asyncio.create_task(told(client, f, e)) for f, e in zip(variants, events, strict=True)]
            await asyncio.gather(*(event.wait() for event in events))
            swarm.nodes[1].signal(signal.SIGKILL)
            assert await asyncio.gather(*tasks) == undisturbed

    run(ask())
