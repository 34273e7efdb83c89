"""`potluck doctor`: what it makes of what it finds, each trouble with its next step."""

import json
import os
import socket
from pathlib import Path

import msgspec
import pytest

from potluck.cli import doctor_checks as checks
from potluck.cli import main
from potluck.cli.doctor_checks import Finding, Heard, Throughput
from potluck.cli.doctor_probes import free_disk_bytes, is_port_free, privacy_of
from potluck.node.identity_file import own_key, own_run_file, own_swarm_file
from potluck.node.run_file import RunningNode
from potluck.swarm.interfaces import Interface
from potluck.testing.scripted_swarm import ScriptedSwarm
from potluck.trust.keeper import SwarmKeeper
from tests.support.damage import DAMAGES
from tests.support.partial_models import whole_tiny

LOOPBACK, LAN, DOCKER = (
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "192.168.0.7"),
    Interface("docker0", "172.17.0.1"),
)
DOWN = Interface("eth1", "10.0.0.1", is_up=False)
PEER = {
    "id": "bb" * 32, "name": "anna", "version": "1", "arithmetic": 1, "addresses": ["192.168.0.8:7475"], "is_connected": True,
    "is_usable": True, "rtt_ms": 0.8, "holds_weights": True,
}  # fmt: skip


def details(*peers: dict, **changes: object) -> dict:
    told = {
        "state": {"swarm": {"id": "5a" * 32, "self": "aa" * 32, "name": ""}}, "peers": list(peers), "members": [{}, {}],
        "processes": {"version": "1", "arithmetic": 1, "daemon_pid": 7, "memory_bytes": 1, "workers": []},
        "duplicates": [], "discovery": {"is_used": True, "active": [{"name": "eth0"}], "broken": []},
    }  # fmt: skip
    return told | changes


def all_good(findings: list[Finding]) -> bool:
    return all(finding.verdict == "ok" and not finding.next for finding in findings)


@pytest.mark.parametrize(
    ("finding", "verdict", "hint"),
    [
        (checks.check_python((3, 11, 7), "Linux"), "ok", ""),
        (checks.check_python((3, 10, 1), "Linux"), "fail", "newer Python"),
        (checks.check_packages(["msgspec"]), "fail", "source folder: pip install -c constraints.txt ."),
        (checks.check_engine(None, None), "warn", "source folder: pip install -c constraints.txt '.[cpu]'"),
        (checks.check_engine("0.65", "0.48"), "ok", ""),
        (checks.check_memory(100 << 20, 8 << 30), "fail", "close"),
        (checks.check_memory(600 << 20, 8 << 30), "warn", "--memory"),
        (checks.check_memory(4 << 30, 8 << 30), "ok", ""),
        (checks.check_disk("/x", 1 << 20), "fail", "potluck remove"),
        (checks.check_disk("/x", 1 << 30), "warn", "POTLUCK_HOME"),
        (checks.check_private_file("key", "/k", "can be read by others"), "fail", "chmod 600 /k"),
        (checks.check_private_file("key", "/k", ""), "ok", ""),
        (checks.check_configuration("/c", True, "colour is not a key"), "fail", "mend /c"),
        (checks.check_port("the API", 7470, True, [], "--api X"), "ok", ""),
        (checks.check_port("the API", 7470, False, [7475, 7470], "--api X"), "ok", ""),
        (checks.check_port("the API", 7470, False, [7475], "--api X"), "warn", "--api X"),
    ],
)
def test_this_machine(finding: Finding, verdict: str, hint: str) -> None:
    assert finding.verdict == verdict
    assert hint in finding.next
    assert bool(finding.next) == (verdict != "ok")


def test_interfaces_that_are_left_out_are_named_with_the_reason() -> None:
    finding = checks.check_interfaces([LOOPBACK, LAN, DOCKER, DOWN], [LAN], [])
    assert finding.verdict == "ok"
    for words in ("eth0 (192.168.0.7)", "lo: this machine only", "docker0: a bridge or tunnel", "eth1: down"):
        assert words in finding.text
    assert checks.check_interfaces([], [], []).verdict == "fail"
    assert checks.check_interfaces([LOOPBACK], [LOOPBACK], []).verdict == "warn"
    assert "--interface" in checks.check_interfaces([DOCKER], [DOCKER], []).next
    assert checks.check_interfaces([LAN], [LAN], ["eth0"]).verdict == "warn"


def test_multicast_that_does_not_come_back_or_from_nobody_although_linked() -> None:
    own = "aa" * 32
    heard = [Heard("eth0", True, (own[:16], "bb" * 8))]
    assert "bb" * 8 in checks.check_multicast(heard, [PEER], own, "linux").text
    alone = checks.check_multicast([Heard("eth0", True, (own[:16],))], [], own, "linux")
    assert (alone.verdict, alone.next) == ("ok", "")
    isolated = checks.check_multicast([Heard("eth0", True)], [PEER], own, "linux")
    assert (isolated.verdict, "client isolation" in isolated.next) == ("warn", True)
    by_one_family = checks.check_multicast([Heard("eth0", True), Heard("eth0", False)], [], own, "linux")
    assert by_one_family.verdict == "ok"
    deaf = [checks.check_multicast([Heard("eth0", False)], [], own, each) for each in ("linux", "darwin", "win32")]
    assert {finding.verdict for finding in deaf} == {"fail"}
    assert len({finding.next for finding in deaf}) == 3
    local = PEER | {"addresses": ["127.0.0.1:7475"]}
    assert checks.check_multicast([Heard("eth0", True)], [local], own, "linux").verdict == "ok"


def test_a_sound_swarm_has_nothing_to_complain_of() -> None:
    assert all_good(checks.check_running(details(PEER), "1"))
    assert all_good([checks.check_peer(PEER, Throughput("bb", 900.0)), checks.check_peer(PEER, None)])


def test_versions_arithmetic_and_clones() -> None:
    other = PEER | {"version": "2", "arithmetic": 2}
    found = {each.check: each for each in checks.check_running(details(other), "1")}
    assert (found["versions"].verdict, found["arithmetic"].verdict) == ("warn", "fail")
    assert checks.check_running(details(), "3")[0].verdict == "warn"
    clone = [{"id": "bb" * 32, "addresses": [["10.0.0.1:1"], ["10.0.0.2:1"]]}]
    found = {each.check: each for each in checks.check_running(details(duplicates=clone), "1")}
    assert found["duplicate ids"].verdict == "fail"
    assert "10.0.0.1:1 and 10.0.0.2:1" in found["duplicate ids"].text
    assert "potluck leave --forget --new-key, then potluck join" in found["duplicate ids"].next


def test_a_node_that_was_expelled_is_told_so_and_what_to_do() -> None:
    told = "this node was expelled from swarm home by aabbccdd; ask for a new invite, then type here: potluck join"
    found = checks.check_running(details(expulsion=told), "1")[0]
    assert (found.verdict, found.text) == ("fail", "this node was expelled from swarm home by aabbccdd")
    assert found.next.startswith("ask for a new invite")


def test_peers_that_are_gone_slow_or_cannot_be_measured() -> None:
    assert checks.check_peer(PEER | {"is_connected": False, "is_usable": False}, None).verdict == "fail"
    assert checks.check_peer(PEER | {"is_connected": False}, None).verdict == "ok"  # in a swarm of very many
    assert checks.check_peer(PEER | {"rtt_ms": 80.0}, None).verdict == "warn"
    assert checks.check_peer(PEER, Throughput("bb", 5.0)).verdict == "warn"
    unknown = checks.check_peer(PEER, Throughput("bb", None, "holds no weights"))
    assert (unknown.verdict, "holds no weights" in unknown.text) == ("ok", True)


def test_layers_that_nobody_holds_are_a_failure_with_the_swarms_own_advice() -> None:
    found = checks.check_models(ScriptedSwarm().state("http://x", False))
    assert [each.verdict for each in found] == ["ok", "fail"]
    assert "8-14" in found[1].text
    assert found[1].next


def test_a_swarm_without_a_model_is_told_what_can_be_typed_while_its_node_runs() -> None:
    state = msgspec.structs.replace(ScriptedSwarm().state("http://x", False), models=())
    [found] = checks.check_models(state)
    assert (found.verdict, found.next) == ("warn", "potluck leave, then potluck up --model NAME")


def test_a_node_without_an_api_runs_and_cannot_be_reached(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    with own_run_file().held():
        own_run_file().write(RunningNode(41, "aa", "bb", (), ""))
        found = _found(capsys)["node"]
    assert (found.verdict, "commands cannot reach it" in found.text) == ("fail", True)
    assert "potluck up --api 127.0.0.1:PORT" in found.next


def test_probes_of_files_and_ports(tmp_path: Path) -> None:
    key = tmp_path / "node.key"
    assert privacy_of(key) == ""
    key.write_bytes(b"x")
    key.chmod(0o644)
    assert "others" in (privacy_of(key) or "") or os.name != "posix"
    key.chmod(0o600)
    assert privacy_of(key) is None
    assert free_disk_bytes(tmp_path / "not" / "there" / "yet") > 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not is_port_free(taken.getsockname()[1])


def test_a_bad_configuration_fails_and_ends_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    assert main.run(["doctor", "--quick"]) in (0, 1)
    assert "WARN  node: none is running" in capsys.readouterr().out
    (tmp_path / "config.toml").write_text("rubbish")
    assert main.run(["doctor", "--quick"]) == 1
    assert f"next: mend {tmp_path}/config.toml" in capsys.readouterr().out


def _found(capsys: pytest.CaptureFixture[str]) -> dict[str, Finding]:
    """Of a whole run, by check: nothing that it looks at may end it half-way."""
    capsys.readouterr()
    assert main.run(["doctor", "--quick", "--json"]) in (0, 1)
    told = json.loads(capsys.readouterr().out)["findings"]
    assert "node" in {each["check"] for each in told}
    return {each["check"]: msgspec.convert(each, Finding) for each in told}


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of a node with a swarm and a model."""
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path))
    SwarmKeeper.found(own_key(), own_swarm_file(), "").serve_model("tiny", whole_tiny(tmp_path).entry.weights_sha256)
    return tmp_path


def test_a_sound_home_has_nothing_to_complain_of(member: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _found(capsys)
    assert all_good([found[check] for check in ("home", "key", "swarm file", "models", "configuration")])


@pytest.mark.parametrize("content", [b"", b"rubbish", bytes(5000)])
@pytest.mark.parametrize(("name", "check"), [("node.key", "key"), ("node.swarm", "swarm file")])
def test_broken_contents_of_key_and_swarm_file_are_found(
    member: Path, capsys: pytest.CaptureFixture[str], name: str, check: str, content: bytes
) -> None:
    (member / name).write_bytes(content)
    found = _found(capsys)
    assert (found[check].verdict, str(member / name) in found[check].text) == ("fail", True)
    assert found[check].next
    others = {"key", "swarm file"} - {check}
    assert all_good([found[other] for other in others])


def test_a_swarm_file_of_another_key_or_of_none_is_found(member: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (member / "node.key").rename(member / "aside")
    assert "a key that is not here" in _found(capsys)["swarm file"].text
    own_key()
    assert _found(capsys)["swarm file"].verdict == "fail"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_models_are_found(member: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    DAMAGES[damage](member / "models" / "tiny")
    finding = _found(capsys)["model tiny"]
    assert (finding.verdict, "potluck remove tiny" in finding.next) == ("fail", True)
    assert "potluck remove" not in finding.text, "once is enough"


def test_a_broken_entry_and_folders_in_the_place_of_files_are_found(
    member: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (member / "models" / "tiny" / "entry.json").write_text("{}")
    (member / "config.toml").mkdir()
    (member / "node.key").unlink()
    (member / "node.key").mkdir()
    found = _found(capsys)
    assert [found[each].verdict for each in ("model tiny", "configuration", "key")] == ["fail"] * 3
    assert "Is a directory" in found["configuration"].text
    assert "chmod" not in found["key"].next


@pytest.mark.parametrize("where", ["/proc/nowhere", "file", "file/below"])
def test_a_home_that_cannot_be_written_is_found(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("POTLUCK_HOME", str(tmp_path / where))
    finding = _found(capsys)["home"]
    assert (finding.verdict, "POTLUCK_HOME" in finding.next) == ("fail", True)
