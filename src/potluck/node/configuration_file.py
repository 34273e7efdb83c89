"""Where the configuration file lies: POTLUCK_CONFIG, or config.toml beside the models. A missing file means the defaults."""

import os

from potluck.core.configuration import DistributedSettings, parse_configuration
from potluck.core.errors import BadRequest
from potluck.core.paths import locate_folders


def read_configuration() -> DistributedSettings:
    named = os.environ.get("POTLUCK_CONFIG")
    path = named or str(locate_folders().models.parent / "config.toml")
    try:
        with open(path, "rb") as file:
            return parse_configuration(file.read((1 << 20) + 1), path)
    except FileNotFoundError:
        if named:
            raise BadRequest(f"POTLUCK_CONFIG names {path}, which does not exist") from None
        return DistributedSettings()
