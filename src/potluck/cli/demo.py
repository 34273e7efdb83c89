"""`potluck demo`: three real nodes, one question, one node killed in the middle of the answer; is the text the same?"""

import os
import signal
from typing import Annotated

import typer

from potluck.cli.ask import find_or_pull
from potluck.cli.console import EXIT_FAILURE, JsonOption, notice, print_json
from potluck.cli.models import open_store

_QUESTION = "What is a potluck dinner, and what would you bring to one?"


def demo(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")] = _QUESTION,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model of `potluck models`.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=8, help="At most this many tokens.")] = 120,
    as_json: JsonOption = False,
) -> None:
    """Start three nodes, ask, kill one with SIGKILL half way through, and compare with the undisturbed answer."""
    from potluck.net.loop import run
    from potluck.node.configuration_file import require_enabled
    from potluck.testing.local_swarm import LocalSwarm, split_plan

    require_enabled()
    entry = find_or_pull(open_store(), model, as_json)
    say = _ignore if as_json else notice
    say(
        "starting three nodes: two halves of the model, and a spare that holds all of it (the first start compiles kernels)"
    )
    with LocalSwarm(entry.id, split_plan(entry.layer_count, 2, 1)) as swarm:
        for node in swarm.nodes:
            assert node.announcement is not None
            say(
                f"  {node.announcement.shard} at {node.address}, daemon {node.pid}, worker {node.announcement.worker_pid}"
            )
        report = run(_ask_twice(swarm, entry.id, question, max_tokens, as_json))
    if as_json:
        print_json(report)
    else:
        _print_verdict(report)
    if not report["identical"]:
        raise typer.Exit(EXIT_FAILURE)
    if not as_json:
        _invite_to_more(entry.id, entry.layer_count)


def _invite_to_more(model: str, layer_count: int) -> None:
    """On a terminal the demonstration goes on, with a page to play with; elsewhere it says how to get there."""
    import sys

    from potluck.cli.api_options import free_place
    from potluck.cli.local import run_local_swarm

    print("next: a page that shows the machines, and has a button that kills one under your own answer")
    if not sys.stdout.isatty() or not sys.stdin.isatty():
        print("      potluck local --swarm     three nodes on this machine, with that page")
        print("      potluck up                this machine as the first of your own swarm; then `potluck invite`")
        return
    run_local_swarm(model, layer_count, 3, 1, free_place(), False)


def _ignore(message: str) -> None:
    return


async def _ask_twice(
    swarm: "object", model_name: str, question: str, max_tokens: int, as_json: bool
) -> dict[str, object]:
    from potluck.core.sampling_params import SamplingParams
    from potluck.identity.keys import NodeKey
    from potluck.net.link import admit_anyone
    from potluck.net.tls import TlsTransport
    from potluck.node.asking import RemoteModel
    from potluck.node.node import Node
    from potluck.orchestrator.frames import ShardFailover, TokenDelta
    from potluck.orchestrator.params import DistributedChatParams
    from potluck.testing.local_swarm import LocalSwarm

    assert isinstance(swarm, LocalSwarm)
    key = NodeKey.generate()
    node = Node(key, TlsTransport(key, admit_anyone))
    try:
        await node.orchestrator.connect(swarm.addresses)
        model = await RemoteModel.find(node, model_name)
        request = model.request(
            model.encode_chat([{"role": "user", "content": question}]), SamplingParams(), max_tokens
        )
        undisturbed = [
            frame.token
            async for frame, _ in model.generate(request, DistributedChatParams())
            if isinstance(frame, TokenDelta)
        ]
        victim, tokens, pauses = swarm.nodes[1], [], []
        async for frame, text in model.generate(request, DistributedChatParams()):
            if not as_json:
                print(text, end="", flush=True)
            if isinstance(frame, TokenDelta):
                tokens.append(frame.token)
                if len(tokens) == max(1, len(undisturbed) // 2):
                    _kill(victim.pid, as_json)
            elif isinstance(frame, ShardFailover):
                pauses.append(round(frame.pause_ms, 1))
        return {
            "model": model_name, "identical": tokens == undisturbed, "tokens": len(tokens), "failovers": len(pauses),
            "pause_ms": max(pauses, default=0.0),
        }  # fmt: skip
    finally:
        await node.stop()


def _kill(pid: int, as_json: bool) -> None:
    if not as_json:
        print("✂", end="", flush=True)
    os.kill(pid, signal.SIGKILL)


def _print_verdict(report: dict[str, object]) -> None:
    verdict = "identical to the undisturbed run" if report["identical"] else "DIFFERENT from the undisturbed run"
    print()
    print(f"[a node was killed at ✂; pause {report['pause_ms']} ms; {report['tokens']} tokens, {verdict}]")
