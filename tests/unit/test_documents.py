"""What the documents name is there: files, links and their anchors, commands. Reads files of the checkout only."""

import re
from pathlib import Path

import pytest
import typer

from potluck.cli.main import app
from potluck.gateway.admission import Tier
from potluck.gateway.responding import ServiceSettings
from potluck.testing.memory_answering import MemoryAnswering
from tests.support.api import app_of, get

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
API = ROOT / "docs" / "api.md"
FOR_USERS = [ROOT / "README.md", *sorted((ROOT / "docs" / "users").glob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
_COMMAND = re.compile(r"(?:^|[`$;&(/]\s?|bin/|or `?|exec )potluck ([a-z]+)(?: ([a-z]+))?", re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors_of(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands_named_in(document: Path) -> set[str]:
    """`potluck COMMAND` in code; of groups like `bench` also the command within."""
    groups = {group.name for group in app.registered_groups}
    found = set()
    for code in _CODE.findall(document.read_text()):
        for command, within in _COMMAND.findall(code):
            found.add(f"{command} {within}" if command in groups and within else command)
    return found


def known_commands() -> set[str]:
    known = set(names_in(app))
    for group in app.registered_groups:
        assert isinstance(group.typer_instance, typer.Typer)
        known |= {str(group.name), *(f"{group.name} {name}" for name in names_in(group.typer_instance))}
    return known


def names_in(group: typer.Typer) -> list[str]:
    return [each.name or getattr(each.callback, "__name__", "") for each in group.registered_commands]


def test_every_file_that_the_architecture_names_exists() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "architecture.md").read_text()))
    assert len(named) > 50
    homes = [ROOT / "src" / "potluck", ROOT]
    bare = {
        "core.py",
        "generation.py",
        "membership.py",
        "service.py",
        "placement.py",
        "route.py",
    }  # in a package's line
    missing = [path for path in named - bare if not any((home / path).is_file() for home in homes)]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for target in _LINK.findall(document.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{name_of(document)} links to {target}"
        assert not anchor or anchor in anchors_of(file), f"{name_of(document)} links to {target}"


@pytest.mark.parametrize("document", FOR_USERS, ids=name_of)
def test_every_command_that_users_are_told_to_type_exists(document: Path) -> None:
    assert commands_named_in(document) - known_commands() == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_piece_of_python_is_python(document: Path) -> None:
    for number, source in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)):
        compile(source, f"{name_of(document)}, piece {number}", "exec")


def test_every_address_of_the_api_that_is_documented_is_there() -> None:
    """The table's first row leaves out its base's `/v1`."""
    app = app_of(MemoryAnswering())
    rows = [line.split("|") for line in API.read_text().splitlines() if line.count("|") == 4]
    cells = [("/v1" if base.strip().endswith("/v1`") else "", paths) for _, _, base, paths, _ in rows]
    addresses = [base + path for base, paths in cells for path in re.findall(r"`(/[\w/.]+)`", paths)]
    assert {"/v1/chat/completions", "/v1/messages/count_tokens", "/api/show", "/tokenize", "/metrics"} <= set(addresses)
    statuses = {path: get(app, path).status_code for path in addresses}
    assert {path for path, status in statuses.items() if status not in (200, 405)} == set()


def test_the_figures_of_the_apis_document_are_the_codes() -> None:
    text, limits = " ".join(API.read_text().split()), ServiceSettings()
    assert f"`max_concurrent_requests` ({limits.admission.max_concurrent_requests}) run" in text
    assert f"an answer has at most {limits.default_max_tokens:,} tokens" in text
    assert f"a comment every {limits.keep_alive_s:.0f} s" in text
    assert (limits.reader_patience_s, limits.admission.patience_s) == (60.0, 60.0)
    assert "takes nothing of its answer for a minute" in text
    assert f"takes less than {limits.least_reading_bytes_per_s / 1024:.0f} KiB a second of it" in text
    assert "does not come within a minute" in text
    for tier, share in zip(Tier, ("¼", "½", "1 ×", "2 ×"), strict=True):
        assert re.search(rf"\| {tier.name.lower()}[^|]*\| {share} \|", text), tier


def test_the_guides_name_commands_at_all() -> None:
    named = set().union(*map(commands_named_in, FOR_USERS))
    assert {"up", "join", "invite", "expel", "doctor", "bench weights"} <= named


def test_decisions_are_numbered_once_each_and_titled_with_their_number() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    numbers = [int(record.name[:4]) for record in records]
    assert len(set(numbers)) == len(numbers)
    for number, record in zip(numbers, records, strict=True):
        assert record.read_text().startswith(f"# {number}. "), record.name
