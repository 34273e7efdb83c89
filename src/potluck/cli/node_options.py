"""The options that every command has which brings this machine into a swarm."""

from typing import Annotated

import typer

MaxLayersOption = Annotated[int, typer.Option("--max-layers", min=0, help="At most so many layers; 0: any.")]
MemoryOption = Annotated[str | None, typer.Option("--memory", help="For weights and KV, e.g. 4GB.")]
ListenOption = Annotated[str | None, typer.Option("--listen", help="Address for other nodes; port 0: any.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--threads", "-t", min=1, help="Threads that compute. Default: one less than there are cores, at most 8."
    ),
]
StreamsOption = Annotated[int, typer.Option("--streams", min=1, help="Sessions at once; more are refused.")]
NameOption = Annotated[str, typer.Option("--name", help="What others see; by default the machine's.")]
InterfaceOption = Annotated[
    list[str] | None, typer.Option("--interface", metavar="NAME", help="Only these network interfaces.")
]
DiscoveryOption = Annotated[bool, typer.Option(help="Find neighbours by mDNS.")]
ServeOption = Annotated[bool, typer.Option(help="Hold layers; without, only ask and serve the API.")]
ChaosOption = Annotated[bool, typer.Option("--chaos", help="Let the page's chaos button kill this node's worker.")]
OwnLayersOption = Annotated[
    str | None,
    typer.Option(
        "--own-layers",
        help="Computed here in every answer of this API: embedding,output or 0-4,25-output; keeps words at home.",
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="What computes: cpu, cuda or cuda:N.")]
BatchInvariantOption = Annotated[
    bool,
    typer.Option("--batch-invariant", help="On a GPU: numbers that do not depend on who shares a batch; slower alone."),
]
