"""Where a node's key and its swarm lie. POTLUCK_KEY names another file, so that several nodes can run from one home."""

import os
from pathlib import Path

from potluck.core.paths import locate_folders
from potluck.identity.keys import NodeKey, load_or_create_key
from potluck.node.run_file import RunFile
from potluck.trust.swarm_file import SwarmFile

PEERS_FILE = "peers"  # where other members were found before


def own_key() -> NodeKey:
    path = key_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    return load_or_create_key(path)


def retire_own_key() -> None:
    """The key is put aside; the next start makes a new one, which nobody knows."""
    path = key_path()
    if path.exists():
        path.replace(path.with_suffix(".key.old"))


def own_swarm_file() -> SwarmFile:
    """Beside the key; whether there is one says whether the node belongs to a swarm."""
    return SwarmFile(key_path().with_suffix(".swarm"))


def own_run_file() -> RunFile:
    """Beside the key; there while a node of this home runs."""
    return RunFile(key_path().with_suffix(".run"))


def own_folder() -> Path:
    """Where a node keeps what it learns of its swarm."""
    return key_path().parent


def forget_own_peers() -> None:
    """Whoever belongs to another swarm would knock at the doors of the last one's members for ever."""
    (own_folder() / PEERS_FILE).unlink(missing_ok=True)


def key_path() -> Path:
    named = os.environ.get("POTLUCK_KEY")
    return Path(named) if named else locate_folders().models.parent / "node.key"
