"""`potluck config`: every value of the configuration, and where it came from."""

import os
from typing import Annotated, NamedTuple

import typer

from potluck.cli.console import JsonOption, format_table, one_line, print_json
from potluck.core.errors import BadRequest


class Value(NamedTuple):
    """`source`: default, file, or the environment variable's name."""

    key: str
    value: object
    source: str


def config(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="Only this one; prints the bare value.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show every value of the configuration, where it came from, and the path of the file."""
    from potluck.node.configuration_file import configuration_bytes, configuration_path

    data = configuration_bytes()
    values = [*file_values(data, configuration_path()), *place_values(configuration_path(), dict(os.environ))]
    if key is not None:
        return _print_one(values, key, as_json)
    if as_json:
        return print_json(
            {
                "file": configuration_path(),
                "exists": data is not None,
                "values": {each.key: {"value": each.value, "source": each.source} for each in values},
            }
        )
    print(f"{configuration_path()}{'' if data is not None else ' (not there: defaults)'}")
    print(
        format_table(("KEY", "VALUE", "FROM"), [(each.key, _shown(each.value), _shown_source(each)) for each in values])
    )
    return None


def _print_one(values: list[Value], key: str, as_json: bool) -> None:
    found = next((each for each in values if each.key == key), None)
    if found is None:
        raise BadRequest(f"there is no key {key}; `potluck config` lists them")
    if as_json:
        return print_json({"key": found.key, "value": found.value, "source": found.source})
    return print(_shown(found.value))


def file_values(data: bytes | None, path: str) -> list[Value]:
    """The keys of the file. Raises BadRequest with all that is wrong in it."""
    from potluck.core.configuration import DistributedSettings, named_keys, parse_configuration
    from potluck.core.configuration_reference import values_of

    settings = DistributedSettings() if data is None else parse_configuration(data, path)
    named = frozenset() if data is None else named_keys(data)
    return [Value(key, value, "file" if key in named else "default") for key, value in values_of(settings).items()]


def place_values(configuration: str, environment: dict[str, str]) -> list[Value]:
    """Where things lie, and which environment variables say so. Secrets are not shown, only that there is one."""
    from potluck.core.paths import locate_folders

    folders = locate_folders(environment)
    home = folders.models.parent

    def source(*variables: str) -> str:
        return next((name for name in variables if environment.get(name)), "default")

    return [
        Value("models_folder", str(folders.models), source("POTLUCK_HOME")),
        Value("cache_folder", str(folders.cache), source("POTLUCK_CACHE", "POTLUCK_HOME")),
        Value("configuration_file", configuration, source("POTLUCK_CONFIG", "POTLUCK_HOME")),
        Value("key_file", environment.get("POTLUCK_KEY") or str(home / "node.key"), source("POTLUCK_KEY", "POTLUCK_HOME")),
        Value("api_key", "set" if environment.get("POTLUCK_API_KEY") else "", source("POTLUCK_API_KEY")),
        Value("hub", environment.get("HF_ENDPOINT") or "https://huggingface.co", source("HF_ENDPOINT")),
        Value("hub_token", "set" if environment.get("HF_TOKEN") else "", source("HF_TOKEN")),
    ]  # fmt: skip


def _shown_source(value: Value) -> str:
    """Two values are what the file may forbid; that it does not forbid them is no reason to think that they are off."""
    is_overruled = value.key in ("enabled", "host.serve_shards") and value.source == "default"
    return "default; `up` and `join` switch it on" if is_overruled else value.source


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return one_line(str(value))
