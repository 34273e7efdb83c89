"""Where Potluck keeps its files: the platform's folders, or everything under POTLUCK_HOME. Creates nothing.

Knows names of folders only; what lies in them is the store's and the caches' business.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

HOME_VARIABLE = "POTLUCK_HOME"
CACHE_VARIABLE = "POTLUCK_CACHE"  # so that several homes on one machine compile their kernels once


class Folders(msgspec.Struct, frozen=True):
    """`models` must survive; whatever is in `cache` can be made again."""

    models: Path
    cache: Path


def locate_folders(environment: Mapping[str, str] = os.environ) -> Folders:
    """The folders that this user's Potluck uses; POTLUCK_HOME overrides every platform rule."""
    home = environment.get(HOME_VARIABLE)
    if home:
        base = Path(home).expanduser().absolute()
        return Folders(models=base / "models", cache=_named_cache(environment) or base / "cache")
    import platformdirs  # here, so that a set POTLUCK_HOME costs nothing

    # roaming=False: models must never travel with a Windows profile.
    data = platformdirs.user_data_path("potluck", appauthor=False, roaming=False)
    cache = _named_cache(environment) or platformdirs.user_cache_path("potluck", appauthor=False)
    return Folders(models=data / "models", cache=cache)


def _named_cache(environment: Mapping[str, str]) -> Path | None:
    named = environment.get(CACHE_VARIABLE)
    return Path(named).expanduser().absolute() if named else None
