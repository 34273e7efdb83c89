"""What each key of the configuration file and each environment variable means. `docs/configuration.md` is made from it. No I/O."""

from typing import NamedTuple

import msgspec

from potluck.core.configuration import DistributedSettings, HostSettings


class Key(NamedTuple):
    """`read_by`: the commands that follow it."""

    name: str
    meaning: str
    read_by: str


class Variable(NamedTuple):
    name: str
    meaning: str
    default: str


_HEADS, _ALL = "`up`, `join`", "`ask --via`, `up`, `join`"
KEYS = (
    Key("enabled", "Typing `potluck up` or `join` switches this machine on; `false` written here keeps it off.", _ALL),
    Key("backend", "How a model is split: by layers. There is no other way yet, so any other name is refused.", _ALL),
    Key("max_shards_per_request", "At most so many machines in one answer's pipeline (1 to 64); a swarm's plan has 16.", _ALL),
    Key(
        "shard_health_timeout_seconds",
        "How long a pipeline may stand still before a shard is replaced (0.1 to 3600); adverts hold four times as long, at least 10 s.",
        _ALL,
    ),
    Key("fallback_to_local", "Whether this machine's own copy of a layer may step in.", _ALL),
    Key(
        "activation_dtype",
        "What travels between shards: `fp32`, `fp16`, `int8`; `auto`: `fp32`. With the others the text depends on the cuts too.",
        _ALL,
    ),
    Key("allow_self_as_shard", "Whether the asking machine's own shards count as any other's; else they come last.", _HEADS),
    Key(
        "max_concurrent_pipelines",
        "Answers at once (1 to 1024), of an API only where it is written here: further requests wait in its queue.",
        _HEADS,
    ),
    Key("host.serve_shards", "`false` written here: this machine only asks, as with `--no-serve`, unless `--serve` is typed.", _HEADS),
    Key(
        "host.shard_eviction_idle_seconds",
        "Without work for so long, a shard gives its memory back until the next request, and drops what it kept of conversations.",
        _HEADS,
    ),
    Key("host.shard_max_vram_mb", "Most memory that shards take (weights and KV), in megabytes, where `--memory` does not say it.", _HEADS),
)  # fmt: skip

VARIABLES = (
    Variable("POTLUCK_HOME", "One folder for everything: models, key, swarm, configuration.", "the platform's data folder"),
    Variable("POTLUCK_CACHE", "Compiled kernels; several homes may share it.", "the platform's cache folder, or `cache` in the home"),
    Variable("POTLUCK_CONFIG", "The configuration file.", "`config.toml` in the home"),
    Variable("POTLUCK_KEY", "The node's key; its swarm and what it learns lie beside it.", "`node.key` in the home"),
    Variable("POTLUCK_API_KEY", "The key that `Client` and `potluck chat --url` show.", "none"),
    Variable(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "Where answers are sent as OpenTelemetry spans (`pip install -c constraints.txt '.[otel]'` in the source folder).",
        "nowhere",
    ),
    Variable("HF_ENDPOINT", "Where `potluck pull hf:…` asks.", "Hugging Face"),
    Variable("POTLUCK_CA", "A file of further certificates that downloads may trust; SSL_CERT_FILE likewise.", "the system's only"),
    Variable("HF_TOKEN", "What it shows there.", "none"),
)  # fmt: skip


def values_of(settings: DistributedSettings) -> dict[str, object]:
    """Every key with its value, in the order of the reference."""
    flat = {name: getattr(settings, name) for name in _names(DistributedSettings) if name != "host"}
    flat |= {f"host.{name}": getattr(settings.host, name) for name in _names(HostSettings)}
    return {key.name: flat.pop(key.name) for key in KEYS} | flat


def _names(kind: type[msgspec.Struct]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(kind)]


def as_toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def rendered_reference() -> str:
    """`docs/configuration.md`."""
    defaults = values_of(DistributedSettings())
    lines = [
        "# Configuration",
        "",
        "<!-- made by potluck.core.configuration_reference.rendered_reference; a test compares -->",
        "",
        "Nothing needs to be configured. The file is `config.toml` in Potluck's folder; `potluck config` prints its path and every value",
        "with where it came from. It is read once, when a command starts, and everything that is wrong with it is said at once. What a",
        "command line says wins over the file, and the file over the defaults. Keys are HearthNet's.",
        "",
        "```toml",
        "[research.distributed_inference]",
        "max_shards_per_request = 8",
        "",
        "[research.distributed_inference.host]",
        "shard_eviction_idle_seconds = 300.0",
        "```",
        "",
        "| key | default | followed by | meaning |",
        "| --- | --- | --- | --- |",
        *(f"| `{key.name}` | `{as_toml(defaults[key.name])}` | {key.read_by} | {key.meaning} |" for key in KEYS),
        "",
        "## Environment variables",
        "",
        "| variable | without it | meaning |",
        "| --- | --- | --- |",
        *(f"| `{each.name}` | {each.default} | {each.meaning} |" for each in VARIABLES),
        "",
    ]
    return "\n".join(lines)
