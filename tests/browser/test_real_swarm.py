"""The page of a real node in a real swarm of three: what it shows is what is there, and the chaos button's verdict is true.

POTLUCK_PICTURES=docs/pictures takes the documentation's pictures on the way, so that every figure in them was measured.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from potluck.testing.real_swarm import RealSwarm, layers_of, real_swarm
from potluck.testing.swarm_process import SwarmProcess
from tests.browser.page_objects import PotluckPage

OPTIONS = ("--listen", "127.0.0.1:0", "--chaos")
HALF = (*OPTIONS, "--max-layers", "16")
ANSWER_TOKENS = 160  # long enough to be hit in the middle, and to fill a picture
SEED = 5  # with a seed of its own each time, some answers would be two words


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, models_home: Path) -> Iterator[RealSwarm]:
    with real_swarm(tmp_path_factory.mktemp("swarm"), models_home) as made:
        first = made.up("kitchen", *HALF)
        made.join("anna", first.command("invite")["invite"], *HALF)
        made.join("ben", first.command("invite")["invite"], *OPTIONS)
        first.wait(lambda: is_settled(first), 90)
        yield made


def is_settled(first: SwarmProcess) -> bool:
    """All three serve, every layer twice."""
    nodes = first.state()["nodes"]
    bars = [shard for node in nodes for shard in node["shards"] if shard["state"] == "serving"]
    copies = [sum(bar["first"] <= layer <= bar["last"] for bar in bars) for layer in range(30)]
    return len(nodes) == 3 and len(bars) == 3 and min(copies) >= 2


@pytest.fixture
def page(browser: Browser, swarm: RealSwarm) -> Iterator[PotluckPage]:
    opened = PotluckPage.open(browser, f"http://{swarm.nodes[0].wait_until_up()['api']}/")
    opened.set_answers(tokens=ANSWER_TOKENS, seed=SEED)
    yield opened
    opened.close()


def keep_pictures(page: PotluckPage, light: str, dark: str | None = None) -> None:
    folder = os.environ.get("POTLUCK_PICTURES")
    if not folder:
        return
    page.tab.wait_for_timeout(1500)  # so that a running answer has text and times to show
    page.tab.screenshot(path=Path(folder) / f"{light}.png")
    if dark is not None:
        page.tab.emulate_media(color_scheme="dark")
        page.tab.screenshot(path=Path(folder) / f"{dark}.png")


def test_the_strip_shows_what_the_nodes_hold_and_a_chat_streams(page: PotluckPage, swarm: RealSwarm) -> None:
    first = swarm.nodes[0]
    state = first.state()
    shown = {(node, start, last) for node, start, last, _ in page.shards()}
    held = {(each.node, *bar) for each in swarm.nodes for bar in layers_of(state, each.node)}
    assert shown == held
    expect(page.part("verdict")).to_have_attribute("data-answer", "yes")
    page.ask("Say hello to the neighbours.")
    page.wait_until_answered(60)
    assert len(page.answer_text.inner_text()) > 5


def test_the_chaos_button_kills_a_shard_and_the_text_stays_identical(page: PotluckPage, swarm: RealSwarm) -> None:
    page.ask("Write a short story about a kitchen where everybody brings a dish.")
    page.part("chaos").click(timeout=30_000)
    assert page.wait_for_verdict(120) == "identical"
    page.ask("And what should I bring? Write a long list, with a reason for every dish.")
    expect(page.part("stage")).not_to_have_count(0, timeout=30_000)
    keep_pictures(page, "page-light", "page-dark")


def test_on_a_phone_chat_and_swarm_are_two_views(browser: Browser, swarm: RealSwarm) -> None:
    options = {"is_mobile": True, "has_touch": True, "device_scale_factor": 2}
    api = swarm.nodes[0].wait_until_up()["api"]
    page = PotluckPage.open(browser, f"http://{api}/", width=390, height=844, **options)
    page.set_answers(tokens=ANSWER_TOKENS, seed=SEED)
    page.ask("What is a potluck dinner, and why do people like it?")
    page.wait_until_answered(60)
    keep_pictures(page, "page-phone-chat")
    page.part("view-swarm").click()
    expect(page.part("strip")).to_be_visible()
    keep_pictures(page, "page-phone-swarm")
    page.close()


def test_a_machine_that_dies_disappears_from_the_strip_and_is_reported(page: PotluckPage, swarm: RealSwarm) -> None:
    last = swarm.nodes[-1]
    gone = last.node
    last.signal(signal.SIGKILL)
    last.process.wait(10)
    expect(page.news("lost").first).to_be_visible(timeout=30_000)
    page.tab.wait_for_function(
        "gone => ![...document.querySelectorAll('[data-testid=\"shard\"]')].some(bar => bar.closest('[data-node]').dataset.node === gone"
        " && bar.dataset.state === 'serving')", arg=gone, timeout=60_000,
    )  # fmt: skip
