"""The scripted page, looked at as a picture: desk and phone are not empty. The documentation's pictures are of a real swarm
(`test_real_swarm.py`), not of these invented figures.
"""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from potluck.testing.page_server import PageServer
from potluck.testing.scripted_swarm import node_id
from tests.browser.page_objects import PotluckPage

QUESTION = "What is a potluck dinner, and why do people like it?"


def keep(page: PotluckPage, path: Path) -> None:
    page.tab.screenshot(path=path)
    assert path.stat().st_size > 20_000  # an empty page is smaller


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_picture_of_the_desk(browser: Browser, server: PageServer, tmp_path: Path, scheme: str) -> None:
    page = PotluckPage.open(browser, server.base_url, scheme=scheme)  # type: ignore[arg-type]
    server.script.hold_after = 40
    page.ask(QUESTION)
    page.wait_until_written("more variety")
    page.part("chaos").click()
    expect(page.answers.last.get_by_test_id("chaos-verdict")).to_contain_text("ben-desktop")
    server.release()
    page.wait_for_verdict()
    server.do(lambda swarm: swarm.reload(node_id(2)))
    server.script.hold_after = 75
    page.ask("And what should I bring?")
    expect(page.part("stage")).to_have_count(3)
    page.wait_until_written("lentil soup")
    keep(page, tmp_path / f"page-{scheme}.png")
    server.release()
    page.wait_until_answered()
    page.close()


def test_a_picture_of_the_phone(browser: Browser, server: PageServer, tmp_path: Path) -> None:
    options = {"is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    page = PotluckPage.open(browser, server.base_url, width=390, height=844, **options)
    server.script.hold_after = 75
    page.ask(QUESTION)
    page.wait_until_written("lentil soup")
    keep(page, tmp_path / "page-phone-chat.png")
    page.part("view-swarm").click()
    keep(page, tmp_path / "page-phone-swarm.png")
    page.part("view-chat").click()
    server.release()
    page.wait_until_answered()
    page.close()
