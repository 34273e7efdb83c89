"""A conversation's next turn over real shards and the real API: only what is new is computed, and the text is the one without that."""

import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import openai
import pytest

from potluck.core.sampling_params import SamplingParams
from potluck.net.loop import run
from potluck.node.asking import RemoteModel
from potluck.orchestrator.frames import Finished, ShardStatus, StreamFrame
from potluck.orchestrator.params import DistributedChatParams
from potluck.orchestrator.request import GenerationSettings
from potluck.testing.local_swarm import LocalNode, LocalSwarm, NodePlan, split_plan
from tests.support.swarms import TINY, frames_of, head_node, stored_tiny, tokens_of

MODEL = "smollm2-135m"
PROMPT = tuple(1 + 37 * number % 400 for number in range(60))
KEEPING = DistributedChatParams(settings=GenerationSettings(keeps_kv=True, prefill_chunk=16))
SAMPLED = SamplingParams(temperature=0.9, seed=3)


def worker_pid(node: LocalNode) -> int:
    assert node.announcement is not None
    return node.announcement.worker_pid


def end_of(frames: list[StreamFrame]) -> Finished:
    assert isinstance(frames[-1], Finished)
    return frames[-1]


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("loss", ["nobody", "a worker"])
def test_the_second_turn_computes_what_is_new_and_gives_the_same_tokens(
    loss: str, dtype: str, models_home: Path
) -> None:
    stored_tiny(models_home)
    params = msgspec.structs.replace(KEEPING, activation_dtype=dtype)

    async def talk(swarm: LocalSwarm) -> tuple[list[StreamFrame], list[StreamFrame]]:
        async with head_node(swarm.addresses) as node:
            model = await RemoteModel.find(node, TINY)
            ask = msgspec.structs.replace(model.request(PROMPT, SAMPLED, 20), eos=())
            first = await frames_of(node, ask, params)
            turn = msgspec.structs.replace(ask, prompt=(*PROMPT, *tokens_of(first), 5, 6, 7))
            if loss == "a worker":
                os.kill(worker_pid(swarm.nodes[1]), signal.SIGKILL)
            second = await frames_of(node, turn, params)
            fresh = msgspec.structs.replace(turn, owner="somebody else")
            return second, await frames_of(node, fresh, params)

    with LocalSwarm(TINY, [NodePlan("0-3"), NodePlan("4-7"), NodePlan(None, is_spare=True)], models_home) as swarm:
        second, fresh = run(talk(swarm))
    assert tokens_of(second) == tokens_of(fresh)
    assert end_of(fresh).reused_tokens == 0
    if loss == "nobody":
        assert end_of(second).reused_tokens == len(PROMPT) + 19  # the last token of an answer is chosen, not computed
        assert not [frame for frame in second if isinstance(frame, ShardStatus)]
    else:
        assert end_of(second).reused_tokens == 0


@pytest.fixture(scope="module")
def api(models_home: Path) -> Iterator[str]:
    with LocalSwarm(MODEL, split_plan(30, 2, 1), models_home) as swarm:
        swarm.start_api()
        assert swarm.head is not None
        yield swarm.head.url


def test_a_chat_says_how_much_of_its_prompt_was_there_already(api: str) -> None:
    client = openai.OpenAI(base_url=f"{api}/v1", api_key="none", max_retries=0)
    said = [{"role": "user", "content": "Tell me in one sentence what a potluck dinner is, and who brings what."}]
    first = client.chat.completions.create(model=MODEL, messages=said, temperature=0, max_tokens=40)
    said += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And the salad?"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=said, temperature=0, max_tokens=8)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens < second.usage.prompt_tokens
    page = urllib.request.urlopen(f"{api}/metrics").read().decode()
    [line] = [line for line in page.splitlines() if line.startswith("distributed_inference_reused_tokens_total ")]
    assert float(line.split()[1]) == second.usage.prompt_tokens_details.cached_tokens


def test_every_choice_of_a_next_turn_uses_what_is_there(api: str) -> None:
    client = openai.OpenAI(base_url=f"{api}/v1", api_key="none", max_retries=0)
    said = [{"role": "user", "content": "Count the guests at the table, from one to twenty, and greet each of them."}]
    ask = {"model": MODEL, "messages": said, "temperature": 1.0, "seed": 9, "max_tokens": 12, "n": 2}
    first, again = (client.chat.completions.create(**ask) for _ in range(2))
    assert [choice.message.content for choice in again.choices] == [choice.message.content for choice in first.choices]
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1
