"""A swarm of real processes on this machine (or on hosts of `namespaces.py`): one founds, the others join and fetch what they need.

For tests and demonstrations. Homes lie under one folder; the model is linked, not copied; nodes are ended whatever happens.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from potluck.testing.swarm_process import SwarmProcess


class RealSwarm:
    """`up` founds, `join` joins; each node has a home of its own under `folder`, and all share compiled kernels."""

    def __init__(self, folder: Path, models: Path, cache: Path, model: str = "smollm2-135m") -> None:
        """`models`: the store that has `model`."""
        self._folder, self._models, self._cache, self._model = folder, models, cache, model
        self.nodes: list[SwarmProcess] = []

    def up(
        self, name: str, *options: str, on_host: Callable[[Sequence[str]], list[str]] = list, has_model: bool = True,
        api: str = "127.0.0.1:0",
    ) -> SwarmProcess:  # fmt: skip
        home = self._folder / name
        if has_model and not (home / "models").exists():
            shutil.copytree(self._models / self._model, home / "models" / self._model, copy_function=_link)
        arguments = ["up", "--name", name, *(["--model", self._model] if has_model else []), *options]
        return self._started(SwarmProcess(home, arguments, cache=self._cache, on_host=on_host, api=api))

    def join(
        self, name: str, invite: str, *options: str, on_host: Callable[[Sequence[str]], list[str]] = list,
        api: str = "127.0.0.1:0",
    ) -> SwarmProcess:  # fmt: skip
        arguments = ["join", invite, "--name", name, *options]
        home = self._folder / name
        return self._started(SwarmProcess(home, arguments, cache=self._cache, on_host=on_host, api=api))

    def _started(self, process: SwarmProcess) -> SwarmProcess:
        self.nodes.append(process)
        process.wait_until_up()
        return process

    def close(self) -> None:
        for node in self.nodes:
            node.end()


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
    return target


@contextlib.contextmanager
def real_swarm(folder: Path, home: Path) -> Iterator[RealSwarm]:
    """`home`: where a POTLUCK_HOME with the default model is."""
    swarm = RealSwarm(folder, home / "models", home / "cache")
    try:
        yield swarm
    finally:
        swarm.close()


def layers_of(state: dict[str, Any], node: str) -> list[tuple[int, int]]:
    """The inclusive ranges that a node serves, as another one sees it."""
    found = next((each for each in state["nodes"] if each["id"] == node), None)
    return [] if found is None else [(shard["first"], shard["last"]) for shard in found["shards"]]
