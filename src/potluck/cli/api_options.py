"""Where a node's HTTP API is served, as the command line says it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.console import notice
from potluck.core.errors import BadRequest

if TYPE_CHECKING:
    from potluck.gateway.server import GatewayServer, GatewaySettings

DEFAULT_API = "127.0.0.1:7470"

ApiOption = Annotated[
    str | None,
    typer.Option("--api", help=f"Address of the HTTP API ({DEFAULT_API}); off: none. An open one asks for a key."),
]
AllowHostOption = Annotated[
    list[str] | None, typer.Option("--allow-host", metavar="NAME", help="A name of this machine.")
]
AllowOriginOption = Annotated[
    list[str] | None, typer.Option("--allow-origin", metavar="URL", help="A site that may ask.")
]


@dataclass(frozen=True)
class ApiOptions:
    """`is_chosen`: the user named the place, so not getting it is an error."""

    address: str
    is_chosen: bool
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def api_options(api: str | None, hosts: list[str] | None, origins: list[str] | None) -> ApiOptions | None:
    """None where the API is switched off. Raises BadRequest for what is no host or no site."""
    if api == "off":
        return None
    from potluck.gateway.guarding import named_host, named_origin

    named_hosts, named_origins = tuple(map(named_host, hosts or ())), tuple(map(named_origin, origins or ()))
    return ApiOptions(api or DEFAULT_API, api is not None, named_hosts, named_origins)


def free_place() -> str:
    """For a page that nobody chose a place for: the usual one, or any port where a node of one's own has that already."""
    from potluck.cli.doctor_probes import is_port_free

    host, _, port = DEFAULT_API.rpartition(":")
    if is_port_free(int(port)):
        return DEFAULT_API
    notice(f"{DEFAULT_API} is taken; the page gets another port")
    return f"{host}:0"


async def started(gateway: "GatewayServer", api: ApiOptions) -> bool:
    """Starts it. Where its place is taken: an error if the user chose that place, else a node without an API."""
    try:
        await gateway.start()
    except OSError as error:
        problem = f"{api.address} cannot be had ({error.strerror or error}); choose another place with --api ADDR"
        if api.is_chosen:
            raise BadRequest(f"no API: {problem}") from None
        notice(f"no API: {problem}")
        return False
    if gateway.new_key is not None:
        notice(f"API key, made now and kept in {gateway_settings(api).key_file}: {gateway.new_key}")
    elif gateway.needs_key:
        notice(f"the API asks for a key; it is in {gateway_settings(api).key_file}")
    return True


def gateway_settings(api: ApiOptions) -> "GatewaySettings":
    from potluck.core.paths import locate_folders
    from potluck.gateway.server import GatewaySettings

    return GatewaySettings(
        address=api.address,
        key_file=locate_folders().models.parent / "api-keys",
        allowed_hosts=frozenset(api.hosts),
        allowed_origins=frozenset(api.origins),
    )
