"""The page's files as they are given out."""

import asyncio
import re
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from potluck.gateway.page_files import PAGE_FOLDER, PageFiles


def test_the_page_is_at_the_root_with_a_strict_policy() -> None:
    response = PageFiles().respond("GET", "/")
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert int(response.headers["Content-Length"]) == len(response.body)


@pytest.mark.parametrize(
    ("path", "kind"), [("main.js", "text/javascript"), ("base.css", "text/css"), ("icon.svg", "image/svg+xml")]
)
def test_parts_have_their_types(path: str, kind: str) -> None:
    assert PageFiles().respond("GET", f"/page/{path}").headers["Content-Type"].startswith(kind)


def test_a_known_etag_gets_304_and_a_strange_one_the_file() -> None:
    files = PageFiles()
    etag = files.respond("GET", "/page/main.js").headers["ETag"]
    known = files.respond("GET", "/page/main.js", f'"other", W/{etag}')
    assert (known.status, known.body) == (304, b"")
    assert files.respond("GET", "/page/main.js", '"other"').status == 200


def test_head_has_the_length_and_no_body() -> None:
    files = PageFiles()
    head, get = files.respond("HEAD", "/"), files.respond("GET", "/")
    assert head.body == b""
    assert head.headers == get.headers


@pytest.mark.parametrize(
    "path",
    [
        "/page/",
        "/page/nothing.js",
        "/page/../page_files.py",
        "/page/%2e%2e/page_files.py",
        "/page//main.js",
        "",
        "/PAGE/main.js",
    ],
)
def test_anything_else_is_not_found(path: str) -> None:
    assert PageFiles().respond("GET", path).status == 404


def test_other_methods_are_refused() -> None:
    response = PageFiles().respond("POST", "/")
    assert response.status == 405
    assert response.headers["Allow"] == "GET, HEAD"


def test_it_speaks_asgi() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("a GET has nothing to receive")

    scope = {"type": "http", "method": "GET", "path": "/page/icon.svg", "headers": []}
    asyncio.run(PageFiles()(scope, receive, send))
    assert sent[0]["status"] == 200
    assert (b"content-type", b"image/svg+xml") in sent[0]["headers"]
    assert sent[1]["body"] == (PAGE_FOLDER / "icon.svg").read_bytes()


def test_the_page_names_nothing_outside_itself() -> None:
    """Every import, link and source leads to a file that is here; markup from strings appears nowhere."""
    files = PageFiles()
    for path in PAGE_FOLDER.iterdir():
        text = path.read_text()
        for name in re.findall(r"from \"\./([\w.]+)\"", text):
            assert f"/page/{name}" in files.paths, f"{path.name} imports {name}"
        for link in re.findall(r"(?:src|href)=\"(/[^\"]*)\"", text):
            assert link in files.paths, f"{path.name} has {link}"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path.name
        )
        assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text), path.name


def test_only_known_kinds_of_files_are_given_out(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<!doctype html>")
    (tmp_path / "notes.txt").write_text("secret")
    assert PageFiles(tmp_path).paths == ("/page/index.html", "/")
