"""Addresses as people write them."""

import pytest

from potluck.core.errors import BadRequest
from potluck.net.addresses import format_address, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("kitchen.local:7777", "kitchen.local", 7777), ("[::1]:65535", "::1", 65535)],
)
def test_good(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text", ["", "host", ":80", "host:", "host:x", "host:65536", "::1:80", "host:-1", "host:٣", "[]:1"]
)
def test_bad(text: str) -> None:
    with pytest.raises(BadRequest, match="not an address like"):
        parse_address(text)
