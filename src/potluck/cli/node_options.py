"""The options that every command has which brings this machine into a swarm."""

from collections.abc import Mapping
from typing import Annotated

import typer

from potluck.cli.console import require_utf8
from potluck.core.errors import BadRequest

# What a node's advert can say, and a machine can do: a larger number is a slip of the keyboard.
MOST_THREADS, _MOST_LAYERS, _MOST_STREAMS = 1024, 4096, 65_536
_MOST_NAME_CHARACTERS = 64


def _checked_name(name: str) -> str:
    if len(name) > _MOST_NAME_CHARACTERS:
        raise BadRequest(f"--name has at most {_MOST_NAME_CHARACTERS} characters")
    return require_utf8(name, "--name")


def _checked_own_layers(text: str | None) -> str | None:
    """Before anything is started; whether they fit a model is known later."""
    if text is not None:
        from potluck.cli.chat_params import require_own_layers_like

        require_own_layers_like(text)
    return text


def refuse_idle(given: Mapping[str, object], reason: str) -> None:
    """`given`: options that do nothing here, with whether somebody typed them. Raises BadRequest rather than ignore one."""
    typed = [option for option, is_given in given.items() if is_given]
    if typed:
        raise BadRequest(f"{' and '.join(typed)} would do nothing: {reason}")


def is_serving(asked: bool | None) -> bool:
    """Whether this machine is to hold layers: what was typed, else what the configuration file allows."""
    from potluck.node.configuration_file import may_serve_shards

    return may_serve_shards() if asked is None else asked


MaxLayersOption = Annotated[
    int, typer.Option("--max-layers", min=0, max=_MOST_LAYERS, help="At most so many layers; 0: any.")
]
MemoryOption = Annotated[str | None, typer.Option("--memory", help="For weights and KV, e.g. 4GB.")]
ListenOption = Annotated[str | None, typer.Option("--listen", help="Address for other nodes; port 0: any.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads",
        "-t",
        min=1,
        max=MOST_THREADS,
        help="Threads that compute. Default: one less than there are cores, at most 8.",
    ),
]
StreamsOption = Annotated[
    int, typer.Option("--streams", min=1, max=_MOST_STREAMS, help="Sessions at once; more are refused.")
]
NameOption = Annotated[
    str, typer.Option("--name", callback=_checked_name, help="What others see; by default the machine's.")
]
InterfaceOption = Annotated[
    list[str] | None, typer.Option("--interface", metavar="NAME", help="Only these network interfaces.")
]
DiscoveryOption = Annotated[bool, typer.Option(help="Find neighbours by mDNS.")]
ServeOption = Annotated[
    bool | None,
    typer.Option(
        "--serve/--no-serve",
        help="Hold layers, or only ask and serve the API. Default: hold them, unless the configuration forbids it.",
    ),
]
ChaosOption = Annotated[bool, typer.Option("--chaos", help="Let the page's chaos button kill this node's worker.")]
OwnLayersOption = Annotated[
    str | None,
    typer.Option(
        "--own-layers",
        callback=_checked_own_layers,
        help="Computed here in every answer of this API: embedding,output or 0-4,25-output; keeps words at home.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="What computes: cpu, cuda or cuda:N.")]
BatchInvariantOption = Annotated[
    bool,
    typer.Option("--batch-invariant", help="On a GPU: numbers that do not depend on who shares a batch; slower alone."),
]
