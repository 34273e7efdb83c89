"""Where a node's HTTP API is served, as the command line says it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from potluck.gateway.server import GatewaySettings

DEFAULT_API = "127.0.0.1:7470"


@dataclass(frozen=True)
class ApiOptions:
    """`is_chosen`: the user named the place, so not getting it is an error."""

    address: str
    is_chosen: bool
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()


def api_options(api: str | None, hosts: list[str] | None, origins: list[str] | None) -> ApiOptions | None:
    """None where the API is switched off."""
    if api == "off":
        return None
    return ApiOptions(api or DEFAULT_API, api is not None, tuple(hosts or ()), tuple(origins or ()))


def gateway_settings(api: ApiOptions) -> "GatewaySettings":
    from potluck.core.paths import locate_folders
    from potluck.gateway.server import GatewaySettings

    return GatewaySettings(
        address=api.address,
        key_file=locate_folders().models.parent / "api-keys",
        allowed_hosts=frozenset(api.hosts),
        allowed_origins=frozenset(api.origins),
    )
