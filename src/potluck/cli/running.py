"""How commands talk to the node that runs from this home: over its own API on loopback."""

from typing import Any

import msgspec

from potluck.core.errors import BadRequest, PotluckError

_TIMEOUT_S = 10.0


class NodeNotRunning(BadRequest):
    code = "node_not_running"


def running_node() -> "Any":
    """What the node of this home wrote down at its start. Raises NodeNotRunning."""
    from potluck.node.identity_file import own_run_file

    running = own_run_file().read()
    if running is None:
        raise NodeNotRunning("no node of this home is running; type: potluck up")
    return running


def call(method: str, path: str, body: object = None, timeout_s: float = _TIMEOUT_S) -> Any:
    """One request to the running node; the decoded answer. Raises NodeNotRunning, PotluckError with what the node says."""
    import http.client

    running = running_node()
    if not running.api:
        raise NodeNotRunning("the node runs without its API (--api off), so it cannot be asked")
    host, _, port = running.api.rpartition(":")
    connection = http.client.HTTPConnection(_local(host), int(port), timeout=timeout_s)
    try:
        data = None if body is None else msgspec.json.encode(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **_key_header(host)})
        response = connection.getresponse()
        answer = msgspec.json.decode(response.read())
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise PotluckError(f"the node at {running.api} does not answer: {error}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise PotluckError(answer.get("error", {}).get("message", f"status {response.status}"))
    return answer


def _local(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "[::]") else host.strip("[]")  # noqa: S104 - compared with


def _key_header(host: str) -> dict[str, str]:
    """An API that is open to the network wants its key, also from here."""
    from potluck.cli.api_options import ApiOptions, gateway_settings
    from potluck.gateway.api_keys import is_loopback, load_or_create_api_keys

    if is_loopback(host.strip("[]")):
        return {}
    key_file = gateway_settings(ApiOptions("", False)).key_file
    assert key_file is not None
    keys, _ = load_or_create_api_keys(key_file)
    return {"Authorization": f"Bearer {next(iter(keys))}"}
