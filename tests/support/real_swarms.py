"""Real swarms for tests: homes with and without the model, nodes that are ended whatever happens."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from potluck.testing.swarm_process import SwarmProcess

MODEL = "smollm2-135m"


class RealSwarm:
    """`up` founds, `join` joins; each node has a home of its own under one folder, and all share compiled kernels."""

    def __init__(self, folder: Path, models_home: Path) -> None:
        self._folder, self._models_home = folder, models_home
        self.nodes: list[SwarmProcess] = []

    def up(
        self, name: str, *options: str, on_host: Callable[[Sequence[str]], list[str]] = list, has_model: bool = True,
        api: str = "127.0.0.1:0",
    ) -> SwarmProcess:  # fmt: skip
        home = self._folder / name
        if has_model and not (home / "models").exists():
            shutil.copytree(self._models_home / "models" / MODEL, home / "models" / MODEL, copy_function=_link)
        arguments = ["up", "--name", name, *(["--model", MODEL] if has_model else []), *options]
        return self._started(SwarmProcess(home, arguments, cache=self._models_home / "cache", on_host=on_host, api=api))

    def join(
        self, name: str, invite: str, *options: str, on_host: Callable[[Sequence[str]], list[str]] = list,
        api: str = "127.0.0.1:0",
    ) -> SwarmProcess:  # fmt: skip
        arguments = ["join", invite, "--name", name, *options]
        home = self._folder / name
        return self._started(SwarmProcess(home, arguments, cache=self._models_home / "cache", on_host=on_host, api=api))

    def _started(self, process: SwarmProcess) -> SwarmProcess:
        self.nodes.append(process)
        process.wait_until_up()
        return process

    def close(self) -> None:
        for node in self.nodes:
            node.end()


def _link(source: str, target: str) -> str:
    os.link(source, target)
    return target


@contextlib.contextmanager
def real_swarm(folder: Path, models_home: Path) -> Iterator[RealSwarm]:
    swarm = RealSwarm(folder, models_home)
    try:
        yield swarm
    finally:
        swarm.close()


def layers_of(state: dict, node: str) -> list[tuple[int, int]]:
    """The inclusive ranges that a node serves, as another one sees it."""
    found = next((each for each in state["nodes"] if each["id"] == node), None)
    return [] if found is None else [(shard["first"], shard["last"]) for shard in found["shards"]]
