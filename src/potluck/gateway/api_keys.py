"""The API's keys in a file that only its owner can read: a key, and perhaps a tier, on each line."""

import ipaddress
import os
import secrets
from pathlib import Path

from potluck.core.errors import BadKeyFile
from potluck.gateway.admission import Tier

_MAX_FILE_BYTES = 1 << 20
_SHORTEST_KEY = 16


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_or_create_api_keys(path: Path) -> tuple[dict[str, Tier], str | None]:
    """The keys with their tiers, and the one that was made now because there was none."""
    try:
        return _load(path), None
    except FileNotFoundError:
        key = f"potluck-{secrets.token_urlsafe(24)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(
            f"# One key on each line, and perhaps its tier: bronze, silver, gold (the default) or platinum.\n{key}\n"
        )
    return {key: Tier.GOLD}, key


def _load(path: Path) -> dict[str, Tier]:
    status = path.stat()
    if os.name == "posix" and status.st_mode & 0o077:
        raise BadKeyFile(f"others can read {path}; type: chmod 600 {path}")
    if status.st_size > _MAX_FILE_BYTES:
        raise BadKeyFile(f"{path} is larger than {_MAX_FILE_BYTES} bytes")
    lines = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    keys: dict[str, Tier] = {}
    for parts in lines:
        tier = parts[1].upper() if len(parts) > 1 else "GOLD"
        if len(parts) > 2 or len(parts[0]) < _SHORTEST_KEY or tier not in Tier.__members__:
            raise BadKeyFile(f"{path}: each line is a key of at least {_SHORTEST_KEY} characters and perhaps a tier")
        keys[parts[0]] = Tier[tier]
    if not keys:
        raise BadKeyFile(f"{path} has no key; remove it to have one made")
    return keys
