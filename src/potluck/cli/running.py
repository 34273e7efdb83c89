"""How commands talk to the node that runs from this home: over its own API on loopback."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from potluck.cli.console import notice
from potluck.core.errors import BadRequest, PotluckError

if TYPE_CHECKING:
    import http.client

    from potluck.gateway.page_state import PageState
    from potluck.node.run_file import RunningNode

T = TypeVar("T")
_LOADING_S, _GATHERING_S = 300.0, 10.0  # how long an answer is worth waiting for
_TIMEOUT_S = 10.0
_QUIET_S = 1.0  # what takes longer is explained
_ENDING_S = 3.0
_TAKES_LONG = {"/potluck/leave": "others take over this machine's layers, and the answers that use them end"}
RESTART = "potluck leave, then potluck up"  # while a node runs, `potluck up` alone is refused
_SILENCE_S = 30.0  # an open stream has a sign of life every ten seconds


class NodeNotRunning(BadRequest):
    code = "node_not_running"


class NodeHasNoApi(BadRequest):
    """It runs, and commands cannot reach it. What is wrong stands before the message's semicolon, what to do behind it."""

    code = "node_has_no_api"


class NodeWentAway(PotluckError):
    """It was asked, and ended, or cannot be reached any more, before it had answered."""

    code = "node_went_away"


def running_node() -> "RunningNode":
    """What the node of this home wrote down at its start. Raises NodeNotRunning."""
    from potluck.node.identity_file import own_run_file

    running = own_run_file().read()
    if running is None:
        raise NodeNotRunning("no node of this home is running; type: potluck up")
    return running


def call(method: str, path: str, body: object = None, timeout_s: float = _TIMEOUT_S) -> Any:
    """One request to the running node; the decoded answer. Raises NodeNotRunning, NodeHasNoApi, PotluckError with what it says."""
    import http.client

    address, connection = _connection(timeout_s)
    try:
        with _told_while_waiting(path, timeout_s):
            response = _request(address, connection, method, path, body)
            answer = msgspec.json.decode(response.read())
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        if not isinstance(error, TimeoutError) and has_ended():
            raise PotluckError(f"the node at {address} has ended; type: potluck up") from None
        raise PotluckError(f"the node at {address} does not answer: {error}; see its log, or: potluck doctor") from None
    finally:
        connection.close()
    if response.status != 200:
        told = answer.get("error", {})
        raise refusal(response.status, str(told.get("code")), told.get("message") or f"status {response.status}")
    return answer


@contextlib.contextmanager
def _told_while_waiting(path: str, timeout_s: float) -> Iterator[None]:
    """Says what takes long, where something is known to: nobody should look at an empty line for a minute."""
    timer = None
    if path in _TAKES_LONG:
        timer = threading.Timer(_QUIET_S, notice, [f"{_TAKES_LONG[path]}; waiting up to {timeout_s:.0f} s"])
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


def has_ended() -> bool:
    """Whether the node has gone, or is about to: its connections end before it does."""
    from potluck.node.identity_file import own_run_file

    deadline_s = time.monotonic() + _ENDING_S
    while own_run_file().read() is not None:
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.05)
    return True


def refusal(status: int, code: str, message: str) -> PotluckError:
    """What the node refused, as an error of the same kind and code here."""
    error = BadRequest(message) if status == 400 else PotluckError(message)
    error.code = code
    return error


def events(path: str) -> Iterator[tuple[str, Any]]:
    """Server-sent events of the running node as (name, data). Raises PotluckError when the stream breaks."""
    import http.client

    address, connection = _connection(_SILENCE_S)
    try:
        response = _request(address, connection, "GET", path, None)
        if response.status != 200:
            raise PotluckError(f"the node at {address} refuses {path} with status {response.status}")
        name = ""
        while line := response.readline():
            if line.startswith(b"event: "):
                name = line[7:].decode().strip()
            elif line.startswith(b"data: "):
                yield name, msgspec.json.decode(line[6:])
            elif line == b"\n":
                name = ""
    except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
        raise PotluckError(f"the node at {address} does not answer any more: {error}; type: potluck up") from None
    finally:
        connection.close()
    raise PotluckError(f"the node at {address} has ended; type: potluck up")


def read_state(told: object) -> "PageState":
    from potluck.gateway.page_state import PageState

    return converted(told, PageState)


def converted(told: object, kind: type[T]) -> T:
    """What a node tells, typed. Raises PotluckError where a node of another version tells it otherwise."""
    try:
        return msgspec.convert(told, kind)
    except msgspec.ValidationError as error:
        raise PotluckError(f"the node runs another version of Potluck ({error}); start it again: {RESTART}") from None


def wait_until_answerable(model: str | None) -> None:
    """Waits, and says so, while layers are on their way; returns when there is an answer to be had, or none to wait for."""
    began_s = time.monotonic()
    is_told = False
    while time.monotonic() - began_s < worth_waiting_s(read_state(call("GET", "/potluck/state")), model):
        if not is_told:
            notice("layers are still being loaded; your question waits for them (Ctrl-C ends that)")
            is_told = True
        time.sleep(0.3)


def worth_waiting_s(state: "PageState", model: str | None) -> float:
    """How long after the question layers may still come; 0 where they are there, or where the model is none of this swarm's."""
    wanted = [each for each in state.models if model in (None, each.id)]
    if any(each.can_answer for each in wanted) or (state.models and not wanted):
        return 0.0
    is_loading = any(node.state == "joining" for node in state.nodes) or any(
        shard.state == "loading" for node in state.nodes for shard in node.shards
    )
    return _LOADING_S if is_loading else _GATHERING_S


def api_url() -> str:
    """Where the running node's API is, as seen from here. Raises NodeNotRunning, NodeHasNoApi."""
    host, _, port = _api_address().rpartition(":")
    local = _local(host)
    return f"http://[{local}]:{port}" if ":" in local else f"http://{local}:{port}"


def api_key() -> str | None:
    """An API that is open to the network wants its key, also from here."""
    from potluck.cli.api_options import ApiOptions, gateway_settings
    from potluck.gateway.api_keys import is_loopback, load_or_create_api_keys

    host, noted = _api_address().rpartition(":")[0], running_node().key
    if noted or is_loopback(host.strip("[]")):
        return noted or None
    key_file = gateway_settings(ApiOptions("", False)).key_file  # an earlier build notes none
    assert key_file is not None
    keys, _ = load_or_create_api_keys(key_file)
    return next(iter(keys))


def _api_address() -> str:
    running = running_node()
    if not running.api:
        raise NodeHasNoApi(
            "the node runs without an API (--api off, or its port was taken), so commands cannot reach it; "
            f"end it (Ctrl-C where it runs, or: kill {running.pid}), and start it with: potluck up --api 127.0.0.1:PORT"
        )
    return running.api


def _connection(timeout_s: float) -> "tuple[str, http.client.HTTPConnection]":
    import http.client

    address = _api_address()
    host, _, port = address.rpartition(":")
    return address, http.client.HTTPConnection(_local(host), int(port), timeout=timeout_s)


def _request(
    address: str, connection: "http.client.HTTPConnection", method: str, path: str, body: object
) -> "http.client.HTTPResponse":
    data = None if body is None else msgspec.json.encode(body)
    key = api_key()
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    connection.request(method, path, data, headers)
    return connection.getresponse()


def _local(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "[::]") else host.strip("[]")  # noqa: S104 - compared with
