"""For everybody: phone, dark, keyboard, screen reader, and a policy that the browser enforces."""

import re

import pytest
from playwright.sync_api import Browser, expect

from potluck.testing.page_server import PageServer
from tests.browser.page_objects import PotluckPage

MINIMUM_CONTRAST = 4.5

# The ratio of WCAG 2 for every visible piece of text against the nearest opaque background above it; [ratio, text] of the worst.
CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (value) => value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([red, green, blue]) => 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] > 250) return colour;
    }
    return [255, 255, 255, 255];
  };
  const isShown = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode.textContent.trim(), node = walker.currentNode.parentElement;
    if (!text || !isShown(node) || node.closest('.offscreen, :disabled, option, svg')) continue;
    const [one, other] = [light(rgba(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    found.push([(one + 0.05) / (other + 0.05), text.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0])[0];
}"""

# Whether one sees where the keyboard is: a ring, or for the composer the border around it.
FOCUS_IS_SHOWN = """() => {
  const at = document.activeElement, box = at.closest('.composer');
  const plain = getComputedStyle(document.querySelector('.card')).borderColor;
  return at === document.body || getComputedStyle(at).outlineStyle !== 'none' || (box && getComputedStyle(box).borderColor !== plain);
}"""

NAMELESS = """all => all
  .filter(one => !(one.getAttribute('aria-label') || one.textContent.trim() || one.labels?.length))
  .map(one => one.outerHTML)"""

MARKUP_IS_REFUSED = """() => {
  try { document.createElement('div').innerHTML = '<b>x</b>'; return false; } catch (error) { return error instanceof TypeError; }
}"""


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_sticks_out_on_a_phone(browser: Browser, server: PageServer, width: int) -> None:
    page = PotluckPage.open(browser, server.base_url, width=width, height=844, is_mobile=True, has_touch=True)
    server.script.answer = server.script.answer.replace("python", "python\n" + "x = 'a very long line' " * 12)
    page.ask("What is a potluck, " + "and-a-very-long-word-" * 8)
    page.wait_until_answered()
    assert not page.has_sideways_scroll()
    assert page.tab.evaluate("document.documentElement.scrollWidth") == width
    page.part("view-swarm").click()
    expect(page.part("strip")).to_be_visible()
    assert not page.has_sideways_scroll()
    expect(page.part("question-input")).to_be_hidden()
    page.close()


def test_a_phone_has_its_conversations_in_a_drawer(phone: PotluckPage) -> None:
    phone.ask("hello")
    phone.wait_until_answered()
    phone.part("history-open").click()
    expect(phone.tab.get_by_role("dialog", name="Conversations").get_by_test_id("conversation")).to_have_count(1)
    phone.tab.keyboard.press("Escape")
    expect(phone.tab.get_by_role("dialog", name="Conversations")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(browser: Browser, server: PageServer, scheme: str) -> None:
    page = PotluckPage.open(browser, server.base_url, height=2600, scheme=scheme)  # type: ignore[arg-type]
    server.script.hold_after = 100
    page.ask("hello")
    expect(page.part("stage")).to_have_count(3)
    page.part("chaos").click()
    server.release()
    page.wait_for_verdict()
    ratio, text = page.tab.evaluate(CONTRAST)
    assert ratio >= MINIMUM_CONTRAST, f"{text!r} has a contrast of {ratio:.2f}"
    background = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", background)[0])
    assert (red < 60) == (scheme == "dark")
    page.close()


def test_everything_can_be_done_from_the_keyboard(page: PotluckPage, server: PageServer) -> None:
    keyboard, tab = page.tab.keyboard, page.tab
    keyboard.press("Tab")
    expect(tab.get_by_role("link", name="Skip to the question")).to_be_focused()
    keyboard.press("Enter")
    expect(page.part("question-input")).to_be_focused()
    server.script.hold_after = 12
    keyboard.type("first line")
    keyboard.press("Shift+Enter")
    keyboard.type("second line")
    keyboard.press("Enter")
    page.wait_until_written("A potluck is a meal")
    assert server.bodies[0]["messages"][0]["content"] == "first line\nsecond line"
    keyboard.press("Tab")
    expect(page.part("chaos")).to_be_focused()
    keyboard.press("Enter")
    expect(page.answers.last.get_by_test_id("chaos-verdict")).to_contain_text("ben-desktop")
    server.release()
    assert page.wait_for_verdict() == "identical"
    page.part("settings-open").focus()
    keyboard.press("Enter")
    expect(page.part("settings-dialog")).to_be_visible()
    keyboard.press("Escape")
    expect(page.part("settings-dialog")).to_be_hidden()
    expect(page.part("settings-open")).to_be_focused()


def test_focus_can_be_seen_on_every_stop(page: PotluckPage) -> None:
    page.ask("hello")
    page.wait_until_answered()
    page.part("model").focus()
    stops = 0
    for _ in range(24):
        page.tab.keyboard.press("Tab")
        assert page.tab.evaluate(FOCUS_IS_SHOWN), page.tab.evaluate("document.activeElement.outerHTML.slice(0, 120)")
        stops += 1
    assert stops == 24


def test_every_control_has_a_name(page: PotluckPage) -> None:
    page.ask("hello")
    page.wait_until_answered()
    nameless = page.tab.locator("button, input, select, textarea").evaluate_all(NAMELESS)
    assert nameless == []


def test_a_screen_reader_hears_beginning_and_end_not_every_token(page: PotluckPage, server: PageServer) -> None:
    page.tab.evaluate(
        "() => { window.heard = []; new MutationObserver(() => window.heard.push(document.getElementById('announcer').textContent))"
        ".observe(document.getElementById('announcer'), { childList: true, characterData: true, subtree: true }); }"
    )
    page.ask("hello")
    page.wait_until_answered()
    expect(page.part("announcer")).to_contain_text("Answer complete")
    heard = page.tab.evaluate("window.heard")
    assert heard[0] == "Answering."
    assert len(heard) == 2
    assert page.part("log").get_attribute("aria-live") is None


def test_the_browser_itself_refuses_markup_from_strings(page: PotluckPage) -> None:
    assert page.tab.evaluate(MARKUP_IS_REFUSED)
    page.expected_errors = ["Trusted"]
