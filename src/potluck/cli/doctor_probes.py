"""Where `potluck doctor` gets its facts: this machine, its files, its network, the running node. Judges nothing."""

import asyncio
import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.cli.doctor_checks import Finding, Heard, Throughput, check_store
from potluck.cli.running import NodeNotRunning, call
from potluck.core.errors import BadKeyFile, PotluckError

if TYPE_CHECKING:
    from zeroconf import ServiceStateChange, Zeroconf
    from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

    from potluck.swarm.interfaces import Interface

_TEST_TYPE = "_potluck-test._tcp.local."
_MEASURE_TIMEOUT_S = 20.0


def missing_packages(distribution: str = "potluck") -> list[str]:
    """What the installed package needs and does not find; empty where Potluck runs from its source only."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []
    missing = []
    for text in requirements:
        wanted, _, marker = text.partition(";")
        name = wanted.strip()
        for sign in "<>=!~[ ":
            name = name.partition(sign)[0]
        if "extra" not in marker and "win32" not in marker and version_of(name) is None:
            missing.append(name)
    return missing


def version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def free_disk_bytes(folder: Path) -> int:
    """Of the folder, or of what will hold it."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def privacy_of(path: Path) -> str | None:
    """As `check_private_file` wants it."""
    from potluck.identity.private_file import privacy_complaint

    try:
        return privacy_complaint(path, path.lstat())
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"


def writing_problem(folder: Path) -> str | None:
    """Why no file can be made in the folder, or where it will be; a mount that is read-only shows only when one tries."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".doctor-"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def key_problem(path: Path) -> str | None:
    """What is wrong with the key in the file; None where it is good, or where there is none."""
    from potluck.identity.keys import load_key

    try:
        load_key(path)
    except FileNotFoundError:
        return None
    except (PotluckError, OSError) as error:
        return str(error)
    return None


def swarm_problem(key: Path, path: Path) -> str | None:
    """The same of the swarm's file, which belongs to one key."""
    from potluck.identity.keys import load_key
    from potluck.trust.keeper import SwarmKeeper
    from potluck.trust.swarm_file import SwarmFile

    file = SwarmFile(path)
    try:
        if file.read() is None:
            return None
        SwarmKeeper(load_key(key), file)
    except FileNotFoundError:
        return f"{path} belongs to a key that is not here ({key})"
    except BadKeyFile:
        return None  # is said of the key
    except (PotluckError, OSError) as error:
        return str(error)
    return None


def store_findings() -> list[Finding]:
    from potluck.cli.models import open_store

    store = open_store()
    try:
        return check_store(len(store.list()), store.damaged(are_opened=True))
    except OSError as error:
        return check_store(0, {}, f"{store.root} cannot be read: {error.strerror}")


def is_port_free(port: int) -> bool:
    """Whether a node could listen there, on every interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        if os.name == "posix":  # as servers do; elsewhere this would take ports that are in use
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("0.0.0.0", port))  # noqa: S104 - nothing is served there
        except OSError:
            return False
    return True


def running_details() -> Any:
    """What the running node tells; None where none runs."""
    try:
        return call("GET", "/potluck/details")
    except NodeNotRunning:
        return None


def measure(peer: str) -> Throughput:
    try:
        told = call("POST", "/potluck/measure", {"node": peer}, _MEASURE_TIMEOUT_S)
    except PotluckError as error:
        return Throughput(peer, problem=str(error))
    return Throughput(peer, told["mbit_s"])


def listen_for(interfaces: "Sequence[Interface]", patience_s: float) -> list[Heard]:
    """Announces something on each interface, and listens for it and for nodes."""
    return asyncio.run(_listen_on_all(interfaces, patience_s))


async def _listen_on_all(interfaces: "Sequence[Interface]", patience_s: float) -> list[Heard]:
    return list(await asyncio.gather(*(_Ear(interface).listen(patience_s) for interface in interfaces)))


class _Ear:
    """Two responders on one interface: what one announces the other has to hear through the network's stack."""

    def __init__(self, interface: "Interface") -> None:
        self._interface = interface
        self._name = f"{os.urandom(8).hex()}.{_TEST_TYPE}"
        self._heard: set[str] = set()
        self._own = asyncio.Event()

    async def listen(self, patience_s: float) -> Heard:
        from zeroconf import Error as ZeroconfError

        try:
            await self._listen(patience_s)
        except (OSError, ZeroconfError, RuntimeError, TimeoutError) as error:
            return Heard(self._interface.name, False, (), str(error) or type(error).__name__)
        return Heard(self._interface.name, self._own.is_set(), tuple(sorted(self._heard)))

    async def _listen(self, patience_s: float) -> None:
        from zeroconf.asyncio import AsyncServiceBrowser

        from potluck.swarm.discovery import SERVICE_TYPE

        mouth, ear = self._open(), self._open()
        browser = AsyncServiceBrowser(ear.zeroconf, [_TEST_TYPE, SERVICE_TYPE], handlers=[self._on_change])
        try:
            await mouth.async_register_service(self._announcement())
            await asyncio.sleep(patience_s)
        finally:
            await browser.async_cancel()
            for each in (mouth, ear):
                await each.async_unregister_all_services()
                await each.async_close()

    def _open(self) -> "AsyncZeroconf":
        from zeroconf.asyncio import AsyncZeroconf

        from potluck.swarm.discovery import ip_version

        return AsyncZeroconf(interfaces=[self._interface.address], ip_version=ip_version(self._interface))

    def _announcement(self) -> "AsyncServiceInfo":
        from zeroconf.asyncio import AsyncServiceInfo

        address = ipaddress.ip_address(self._interface.address).packed
        return AsyncServiceInfo(_TEST_TYPE, self._name, addresses=[address], port=9, server=f"{self._name[:16]}.local.")

    def _on_change(
        self, zeroconf: "Zeroconf", service_type: str, name: str, state_change: "ServiceStateChange"
    ) -> None:
        if name == self._name:
            self._own.set()
        elif service_type != _TEST_TYPE:
            self._heard.add(name.partition(".")[0])
