"""What is made of the process that looks at a device: facts, a reason why there are none, or an interruption."""

import signal
import subprocess

import msgspec
import pytest

from potluck.core.device_facts import DeviceFacts
from potluck.core.errors import DeviceUnavailable
from potluck.node.device import ProbeInterrupted, measured_device


def probe_ends(monkeypatch: pytest.MonkeyPatch, code: int, stdout: bytes = b"", stderr: bytes = b"") -> None:
    done = subprocess.CompletedProcess[bytes]([], code, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)


def test_a_probe_that_ctrl_c_ended_says_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_ends(monkeypatch, -signal.SIGINT, stderr=b"Traceback (most recent call last):\nKeyboardInterrupt\n")
    with pytest.raises(ProbeInterrupted, match="cuda was interrupted"):
        measured_device("cuda")


def test_a_probe_that_fails_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_ends(monkeypatch, 1, stderr=b"a warning\nthere is no cuda:9 here\n")
    with pytest.raises(DeviceUnavailable, match=r"^there is no cuda:9 here$") as told:
        measured_device("cuda:9")
    assert not isinstance(told.value, ProbeInterrupted)


def test_a_probe_that_succeeds_gives_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = DeviceFacts(device="cuda", name="a GPU", total_bytes=8 << 30, free_bytes=7 << 30, bytes_per_s=1e11)
    probe_ends(monkeypatch, 0, stdout=msgspec.json.encode(facts))
    assert measured_device("cuda") == facts
