"""The configuration file, as one frozen object: read once, complete in its complaints. Keys are those that HearthNet §7 fixes.

What a command line says wins over the file, and the file over the defaults. `potluck up` switches serving on by being typed; the
file's own default stays off.
"""

import difflib
import tomllib
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from potluck.core.errors import BadRequest
from potluck.core.limits import DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S, MAX_SHARDS_PER_REQUEST

_SECTION = ("research", "distributed_inference")
MAX_FILE_BYTES = 1 << 20


class HostSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[research.distributed_inference.host]`: what this machine gives."""

    serve_shards: bool = False
    shard_eviction_idle_seconds: float = 600.0
    shard_max_vram_mb: int = 20_000


class DistributedSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[research.distributed_inference]`: how this machine asks."""

    enabled: bool = False
    backend: Literal["small_model_layered"] = "small_model_layered"
    max_shards_per_request: int = MAX_SHARDS_PER_REQUEST
    shard_health_timeout_seconds: float = DISTRIBUTED_SHARD_HEALTH_TIMEOUT_S
    fallback_to_local: bool = True
    activation_dtype: Literal["auto", "fp32", "fp16", "int8"] = "auto"
    allow_self_as_shard: bool = False
    max_concurrent_pipelines: int = 4
    host: HostSettings = HostSettings()


_TABLES = (_SECTION[:1], _SECTION, (*_SECTION, "host"))
_KEYS = (
    *((*_SECTION, field.name) for field in msgspec.structs.fields(DistributedSettings) if field.name != "host"),
    *((*_SECTION, "host", field.name) for field in msgspec.structs.fields(HostSettings)),
)
_DEEPEST = max(map(len, _KEYS))
_MOST_TOLD = 20  # of a file that is none of ours


def parse_configuration(data: bytes, source: str) -> DistributedSettings:
    """The settings of a TOML file. Raises BadRequest with everything that is wrong, each with its key."""
    if len(data) > MAX_FILE_BYTES:
        raise BadRequest(f"{source}: larger than {MAX_FILE_BYTES} bytes")
    try:
        document: Any = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadRequest(f"{source}: not a TOML file: {error}") from None
    problems = _name_problems(document)
    settings = _convert(_table(document), problems)
    problems += _range_problems(settings)
    if problems:
        raise BadRequest(f"{source}: " + "; ".join(problems))
    return settings


def named_keys(data: bytes) -> frozenset[str]:
    """The keys that a file names, of those that there are; of a file that `parse_configuration` took."""
    table = _table(tomllib.loads(data.decode("utf-8")))
    host = table.get("host", {})
    return frozenset({key for key in table if key != "host"} | {f"host.{key}" for key in host})


def _table(document: dict[str, Any]) -> dict[str, Any]:
    """Empty where something else has its name; that is a problem of names."""
    table: Any = document
    for name in _SECTION:
        table = table.get(name, {}) if isinstance(table, dict) else {}
    return table if isinstance(table, dict) else {}


def _name_problems(document: dict[str, Any]) -> list[str]:
    """Of whatever nobody reads: a switch that is spelt wrong, or stands in the wrong table, must not seem to be set."""
    unread = list(_unread(document, ()))
    told = [_name_problem(path) for path in unread[:_MOST_TOLD]]
    more = len(unread) - len(told)
    return [*told, f"and {more} more"] if more else told


def _unread(table: dict[str, Any], place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The paths of what is no key, and of what has a table's name and is none."""
    for name, value in table.items():
        path = (*place, name)
        is_table = isinstance(value, dict)
        if is_table and (path in _TABLES or (value and len(path) < _DEEPEST)):
            yield from _unread(value, path)
        elif path not in _KEYS:
            yield path


def _name_problem(path: tuple[str, ...]) -> str:
    shown = ".".join(path)
    if path in _TABLES:
        return f"{shown} is not a table"
    names = {each[-1]: ".".join(each) for each in (*_KEYS, *_TABLES)}  # wherever it stands: each name is there once
    nearest = difflib.get_close_matches(path[-1], names, 1)
    if nearest:
        return f"{shown} is not a key; is {names[nearest[0]]} meant?"
    return f"{shown} is not a key; there are {', '.join(map('.'.join, _KEYS))}"


def _convert(table: dict[str, Any], problems: list[str]) -> DistributedSettings:
    """Key by key, so that one wrong value does not hide the next."""
    host_table = table.get("host", {})
    host = HostSettings(**_checked(host_table if isinstance(host_table, dict) else {}, HostSettings, "host.", problems))
    values = {key: value for key, value in table.items() if key != "host"}
    return DistributedSettings(**_checked(values, DistributedSettings, "", problems), host=host)


def _checked(values: dict[str, Any], kind: type[msgspec.Struct], prefix: str, problems: list[str]) -> dict[str, Any]:
    types = {field.name: field.type for field in msgspec.structs.fields(kind)}
    good = {}
    for key, value in values.items():
        if key not in types:
            continue  # a problem of names
        try:
            good[key] = msgspec.convert(value, types[key], strict=True)
        except msgspec.ValidationError as error:
            problems.append(f"{prefix}{key}: {error}")
    return good


def _range_problems(settings: DistributedSettings) -> list[str]:
    ranges = (
        ("max_shards_per_request", settings.max_shards_per_request, 1, 64),
        ("shard_health_timeout_seconds", settings.shard_health_timeout_seconds, 0.1, 3600),
        ("max_concurrent_pipelines", settings.max_concurrent_pipelines, 1, 1024),
        ("host.shard_eviction_idle_seconds", settings.host.shard_eviction_idle_seconds, 1, 1e7),
        ("host.shard_max_vram_mb", settings.host.shard_max_vram_mb, 1, 10_000_000),
    )
    return [
        f"{name} must be from {low} to {high:g}, not {value}"
        for name, value, low, high in ranges
        if not low <= value <= high
    ]
