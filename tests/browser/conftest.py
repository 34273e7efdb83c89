"""A browser and a scripted node for tests of the page. Where there is no Chromium the tests are skipped, and say so."""

import shutil
from collections.abc import Iterator

import pytest

playwright_api = pytest.importorskip("playwright.sync_api", reason="BROWSER TESTS SKIPPED: playwright is not installed")

from playwright.sync_api import Browser, sync_playwright  # noqa: E402 - only where it is there

from potluck.testing.page_server import PageServer  # noqa: E402
from tests.browser.page_objects import PotluckPage  # noqa: E402


@pytest.fixture(
    scope="package"
)  # not longer: while Playwright runs, this thread has a running loop, and other tests start their own
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("BROWSER TESTS SKIPPED: no Chromium here; on Debian: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer() as server:
        yield server


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[PotluckPage]:
    """The page on a desk, opened; at the end it must have logged no error and asked nobody else for anything."""
    opened = PotluckPage.open(browser, server.base_url)
    yield opened
    opened.close()


@pytest.fixture
def phone(browser: Browser, server: PageServer) -> Iterator[PotluckPage]:
    opened = PotluckPage.open(browser, server.base_url, width=390, height=844, is_mobile=True, has_touch=True)
    yield opened
    opened.close()
