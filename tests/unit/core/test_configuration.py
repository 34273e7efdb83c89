"""The configuration file: what nobody would read in it is refused by name, with what was probably meant, all at once."""

import pytest

from potluck.core.configuration import DistributedSettings, named_keys, parse_configuration
from potluck.core.errors import BadRequest

SECTION = "research.distributed_inference"


def complaint(text: str) -> str:
    with pytest.raises(BadRequest) as caught:
        parse_configuration(text.encode(), "config.toml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "name", "meant"),
    [
        ("[research.distributed_inferance]\nenabled = false", "research.distributed_inferance.enabled", f"{SECTION}.enabled"),
        ("enabled = false", "enabled", f"{SECTION}.enabled"),
        ("[policy.research]\nenable = false", "policy.research.enable", f"{SECTION}.enabled"),
        (f"[{SECTION}]\nenable = false", f"{SECTION}.enable", f"{SECTION}.enabled"),
        (f"[{SECTION}]\nserve_shards = false", f"{SECTION}.serve_shards", f"{SECTION}.host.serve_shards"),
        (f"[{SECTION}.hots]\nserve_shards = false", f"{SECTION}.hots.serve_shards", f"{SECTION}.host.serve_shards"),
        ("[research.distributed_inferance]", "research.distributed_inferance", SECTION),
        ("[host]\nshard_max_vram_mb = 1", "host.shard_max_vram_mb", f"{SECTION}.host.shard_max_vram_mb"),
    ],
)  # fmt: skip
def test_a_key_that_nobody_would_read_is_refused_with_the_one_that_is_meant(text: str, name: str, meant: str) -> None:
    assert complaint(text) == f"config.toml: {name} is not a key; is {meant} meant?"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("colour = 1", "colour"), ("[node]\nport = 7", "node.port"), ("[empty]", "empty"), ("[[list]]\na = 1", "list"),
        (f"[{SECTION}.a.b]\nc = 1", f"{SECTION}.a.b"),
    ],
)  # fmt: skip
def test_where_nothing_is_near_every_key_is_named(text: str, name: str) -> None:
    told = complaint(text)
    assert told.startswith(f"config.toml: {name} is not a key; there are ")
    assert f"{SECTION}.enabled, " in told
    assert f"{SECTION}.host.serve_shards" in told


@pytest.mark.parametrize("table", ["research", SECTION, f"{SECTION}.host"])
def test_what_has_a_tables_name_is_a_table(table: str) -> None:
    assert complaint(f"{table} = 3") == f"config.toml: {table} is not a table"


def test_all_that_is_wrong_is_said_at_once() -> None:
    told = complaint(
        f'enabled = false\n[policy]\ncolour = 1\n[{SECTION}]\nbackend = "x"\nmax_shards_per_request = 0\n[{SECTION}.host]\nhue = 2'
    )
    for words in (
        "enabled is not",
        "policy.colour is not",
        "host.hue is not",
        "backend: ",
        "max_shards_per_request must",
    ):
        assert words in told


def test_a_file_of_something_else_is_told_in_bounds() -> None:
    deep = ".".join(["a"] * 50_000)
    told = complaint(f"{deep} = 1\n" + "".join(f"unknown_{number} = 1\n" for number in range(30)))
    assert "and 11 more" in told
    assert len(told) < 20_000


@pytest.mark.parametrize("text", ["", "[research]", f"[{SECTION}]", f"[{SECTION}.host]"])
def test_empty_tables_of_ours_are_the_defaults(text: str) -> None:
    assert parse_configuration(text.encode(), "config.toml") == DistributedSettings()
    assert named_keys(text.encode()) == frozenset()
