"""Where a node's key lies. POTLUCK_KEY names another file, so that several nodes can run from one home."""

import os
from pathlib import Path

from potluck.core.paths import locate_folders
from potluck.identity.keys import NodeKey, load_or_create_key


def own_key() -> NodeKey:
    named = os.environ.get("POTLUCK_KEY")
    path = Path(named) if named else locate_folders().models.parent / "node.key"
    path.parent.mkdir(parents=True, exist_ok=True)
    return load_or_create_key(path)
