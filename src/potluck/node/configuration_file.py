"""Where the configuration file lies: POTLUCK_CONFIG, or config.toml beside the models. A missing file means the defaults."""

import os

from potluck.core.configuration import MAX_FILE_BYTES, DistributedSettings, named_keys, parse_configuration
from potluck.core.errors import BadRequest, ExperimentalDisabled
from potluck.core.paths import locate_folders

CONFIG_VARIABLE = "POTLUCK_CONFIG"


def configuration_path() -> str:
    return os.environ.get(CONFIG_VARIABLE) or str(locate_folders().models.parent / "config.toml")


def configuration_bytes() -> bytes | None:
    """The file as it is; None where there is none. Raises BadRequest where it cannot be read, or POTLUCK_CONFIG names none."""
    path = configuration_path()
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        if os.environ.get(CONFIG_VARIABLE):
            raise BadRequest(f"{CONFIG_VARIABLE} names {path}, which does not exist") from None
        return None
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}") from None


def read_configuration() -> DistributedSettings:
    data = configuration_bytes()
    return DistributedSettings() if data is None else parse_configuration(data, configuration_path())


def require_enabled() -> None:
    """Typing a command switches this machine on, unless its owner wrote down that it stays off. Raises ExperimentalDisabled."""
    if not read_configuration().enabled and "enabled" in configured_keys():
        raise ExperimentalDisabled(f"{configuration_path()} says enabled = false; change it, or take the line out")


def may_serve_shards() -> bool:
    """Whether this machine may hold layers; the default of `host.serve_shards` does not count, as typing `potluck up` is enough."""
    return read_configuration().host.serve_shards or "host.serve_shards" not in configured_keys()


def configured_keys() -> frozenset[str]:
    """The keys that the file names: only what somebody wrote down can switch off what a command switches on."""
    data = configuration_bytes()
    return frozenset() if data is None else named_keys(data)
