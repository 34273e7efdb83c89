"""Addresses as people write them: "host:port", "[::1]:port". No look-ups here."""

import ipaddress

from potluck.core.errors import BadRequest


def parse_address(address: str) -> tuple[str, int]:
    """Host and port. Raises BadRequest with an example."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise BadRequest(f'"{address}" is not an address like 192.168.0.7:7777 or [::1]:7777')
    return host, int(port)


def may_be_near(address: str) -> bool:
    """Whether it can be on this LAN or VPN: whatever is not a public IP address, names included."""
    try:
        return not ipaddress.ip_address(parse_address(address)[0]).is_global
    except (BadRequest, ValueError):
        return True


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
