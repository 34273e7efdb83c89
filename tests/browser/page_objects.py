"""The page as a test speaks of it: what one can do there and what one can see. Knows test ids, not styles; serves any node."""

import re
from typing import Any, Literal
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Request

# `wait_for` looks at every frame, where `expect` looks once a second after a while: for what takes time, it is the faster one.
_NEWEST = 'article[data-testid="answer"]:nth-last-of-type(1)'


class PotluckPage:
    """One open page. `close` checks what has to be true of every visit."""

    def __init__(self, context: BrowserContext, base_url: str) -> None:
        self._context, self._base_url = context, base_url
        self.tab: Page = context.new_page()
        self.errors: list[str] = []
        self.expected_errors: list[str] = []  # patterns of console errors that the test provokes
        self.foreign_requests: list[str] = []
        self.tab.on("console", self._note_console)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("request", self._note_request)

    @classmethod
    def open(
        cls, browser: Browser, base_url: str, *, width: int = 1440, height: int = 900,
        scheme: Literal["light", "dark"] = "light", waits: bool = True, **options: Any,
    ) -> "PotluckPage":  # fmt: skip
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce", **options
        )
        page = cls(context, base_url)
        page.tab.goto(base_url)
        if waits:
            page.tab.locator('[data-testid="pill"]:not([data-answer="none"])').wait_for()
        return page

    def close(self) -> None:
        self._context.close()
        unexpected = [
            error for error in self.errors if not any(re.search(known, error) for known in self.expected_errors)
        ]
        assert unexpected == []
        assert self.foreign_requests == []

    def _note_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def _note_request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self._base_url).netloc:
            self.foreign_requests.append(request.url)

    # ------------------------------------------------------------ parts

    def part(self, test_id: str) -> Locator:
        return self.tab.get_by_test_id(test_id)

    @property
    def answers(self) -> Locator:
        return self.part("answer")

    @property
    def answer_text(self) -> Locator:
        """The newest answer's text."""
        return self.answers.last.get_by_test_id("answer-text")

    def node(self, test_id: str, node: str) -> Locator:
        return self.tab.locator(f'[data-testid="{test_id}"][data-node="{node}"]')

    def shards(self) -> set[tuple[str, int, int, str]]:
        """(node, first, last, state) of every bar in the strip."""
        found = self.part("strip").locator('[data-testid="shard"]').evaluate_all(
            "bars => bars.map(bar => [bar.closest('[data-node]').dataset.node, +bar.dataset.first, +bar.dataset.last, bar.dataset.state])"
        )  # fmt: skip
        return {(node, first, last, state) for node, first, last, state in found}

    def coverage(self) -> list[tuple[int, int, int]]:
        """(first, last, copies) of the line under the strip."""
        cells = self.part("coverage").evaluate_all(
            "cells => cells.map(cell => [+cell.dataset.first, +cell.dataset.last, +cell.dataset.count])"
        )
        return [(first, last, count) for first, last, count in cells]

    def news(self, kind: str) -> Locator:
        return self.tab.locator(f'[data-testid="news"][data-kind="{kind}"]')

    # ------------------------------------------------------------ doing

    def ask(self, text: str) -> None:
        self.part("question-input").fill(text)
        self.part("question-input").press("Enter")

    def set_answers(self, *, tokens: int, seed: int) -> None:
        self.part("settings-open").click()
        self.part("set-max-tokens").fill(str(tokens))
        self.part("set-seed").fill(str(seed))
        self.tab.keyboard.press("Escape")

    def wait_until_answered(self, timeout_s: float = 20.0) -> None:
        self.tab.locator(f'{_NEWEST}[data-status="done"]').wait_for(timeout=timeout_s * 1000)

    def wait_until_written(self, text: str) -> None:
        self.tab.locator(_NEWEST).filter(has_text=text).wait_for()

    def wait_for_verdict(self, timeout_s: float = 30.0) -> str:
        """The chaos experiment's outcome."""
        ends = ", ".join(f'{_NEWEST} [data-verdict="{end}"]' for end in ("identical", "different", "stopped", "failed"))
        box = self.tab.locator(ends)
        box.wait_for(timeout=timeout_s * 1000)
        return box.get_attribute("data-verdict") or ""

    def has_sideways_scroll(self) -> bool:
        """Whether anything sticks out of the page, or of a column that should only scroll up and down."""
        return bool(self.tab.evaluate(
            "[document.documentElement, ...document.querySelectorAll('.log, .swarm, .top, .composer, .card')]"
            ".some(box => box.scrollWidth > box.clientWidth + 1 && box.clientWidth > 0)"
        ))  # fmt: skip
