"""The chat: streaming, stopping, asking again, editing, settings, conversations, keys, trouble."""

import re

from playwright.sync_api import Browser, Route, expect

from potluck.testing.page_server import ANSWER, PageServer
from tests.browser.page_objects import PotluckPage


def test_an_answer_streams_and_ends_with_its_figures(page: PotluckPage, server: PageServer) -> None:
    server.script.hold_after = 12
    page.ask("What is a potluck?")
    page.wait_until_written("A potluck is a meal")
    expect(page.answers.last).to_have_attribute("data-status", "writing")
    expect(page.part("stop")).to_be_visible()
    server.release()
    page.wait_until_answered()
    page.wait_until_written("the answer comes from all of them.")
    facts = page.answers.last.get_by_test_id("answer-facts")
    expect(facts).to_contain_text("tokens")
    expect(facts).to_contain_text("kitchen → anna → ben-desktop")
    body = server.bodies[0]
    assert body["stream_options"] == {"include_usage": True}
    assert body["messages"] == [{"role": "user", "content": "What is a potluck?"}]
    assert isinstance(body["seed"], int)


def test_the_second_question_carries_the_conversation(page: PotluckPage, server: PageServer) -> None:
    page.ask("one")
    page.wait_until_answered()
    page.ask("two")
    expect(page.answers).to_have_count(2)
    page.wait_until_answered()
    assert [message["role"] for message in server.bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert server.bodies[1]["messages"][1]["content"] == ANSWER


def test_stop_keeps_what_is_there_and_tells_the_node(page: PotluckPage, server: PageServer) -> None:
    server.script.hold_after = 12
    page.ask("stop me")
    page.wait_until_written("A potluck is a meal")
    page.part("stop").click()
    expect(page.answers.last).to_have_attribute("data-status", "stopped")
    page.wait_until_written("A potluck is a meal")
    expect(page.part("send")).to_be_visible()
    expect(page.part("request-facts")).to_have_attribute("data-phase", "finished")  # the node has seen it go
    assert server.disconnects >= 1


def test_regenerate_asks_the_same_with_another_seed(page: PotluckPage, server: PageServer) -> None:
    page.ask("again, please")
    page.wait_until_answered()
    server.script.answer = "Something else."
    page.answers.last.get_by_test_id("regenerate").click()
    expect(page.answer_text).to_have_text("Something else.")
    expect(page.answers).to_have_count(1)
    first, second = server.bodies
    assert first["messages"] == second["messages"]
    assert first["seed"] != second["seed"]


def test_an_edited_question_replaces_what_came_after_it(page: PotluckPage, server: PageServer) -> None:
    page.ask("first wording")
    page.wait_until_answered()
    question = page.part("question")
    question.hover()
    question.get_by_test_id("edit").click()
    question.get_by_role("textbox").fill("second wording")
    question.get_by_role("button", name="Ask again").click()
    expect(page.part("question-text")).to_have_text("second wording")
    page.wait_until_answered()
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "second wording"}]


def test_settings_travel_with_the_question_and_stay(page: PotluckPage, server: PageServer) -> None:
    page.part("settings-open").click()
    for field, value in {
        "temperature": "0.2",
        "top-p": "0.9",
        "max-tokens": "77",
        "seed": "42",
        "system": "Be brief.",
    }.items():
        page.part(f"set-{field}").fill(value)
    page.tab.keyboard.press("Escape")
    page.tab.reload()
    page.ask("hello")
    page.wait_until_answered()
    body = server.bodies[0]
    assert (body["temperature"], body["top_p"], body["max_tokens"], body["seed"]) == (0.2, 0.9, 77, 42)
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}


def test_what_is_asked_before_the_node_has_said_anything_goes_out_when_it_has(
    page: PotluckPage, server: PageServer
) -> None:
    held: list[Route] = []

    def hold(route: Route) -> None:  # Playwright cannot take `held.append` itself
        held.append(route)

    page.tab.route("**/potluck/state", hold)
    page.tab.reload()
    page.ask("early")
    expect(page.part("question-input")).to_have_value("early")
    assert server.bodies == []
    for route in held:
        route.continue_()
    page.tab.unroute("**/potluck/state")
    page.wait_until_answered()
    expect(page.part("question-input")).to_have_value("")
    assert server.bodies[0]["messages"][-1] == {"role": "user", "content": "early"}


def test_conversations_survive_a_reload_and_can_be_deleted(page: PotluckPage) -> None:
    page.ask("the first one")
    page.wait_until_answered()
    page.part("new-chat").click()
    expect(page.part("chat-empty")).to_be_visible()
    page.ask("the second one")
    page.wait_until_answered()
    page.tab.reload()
    rows = page.part("history").get_by_test_id("conversation")
    expect(rows).to_have_count(2)
    rows.filter(has_text="the first one").get_by_role("button").first.click()
    expect(page.part("question-text")).to_have_text("the first one")
    page.wait_until_written("A potluck is a meal")
    rows.filter(has_text="the first one").get_by_role("button").last.click()
    expect(rows).to_have_count(1)
    expect(page.part("chat-empty")).to_be_visible()


def test_a_refusal_is_shown_in_the_nodes_words(page: PotluckPage, server: PageServer) -> None:
    page.expected_errors = ["503"]
    server.script.error = "Nobody has layers 8-14; somebody has to join."
    page.ask("hello")
    expect(page.answers.last.get_by_test_id("trouble")).to_have_text("Nobody has layers 8-14; somebody has to join.")
    server.script.error = ""
    page.answers.last.get_by_test_id("regenerate").click()
    page.wait_until_answered()
    expect(page.answers.last.get_by_test_id("trouble")).to_be_hidden()


def test_a_guarded_node_asks_for_its_key_once(browser: Browser, server: PageServer) -> None:
    server.script.api_key = "pk-right"
    page = PotluckPage.open(browser, server.base_url, waits=False)
    page.expected_errors = ["401"]
    expect(page.part("key-dialog")).to_be_visible()
    page.part("key-input").fill("pk-wrong")
    page.part("key-send").click()
    expect(page.part("key-dialog").get_by_role("alert")).to_be_visible()
    page.part("key-input").fill("pk-right")
    page.part("key-send").click()
    expect(page.part("node-card")).to_have_count(5)
    page.tab.reload()
    expect(page.part("node-card")).to_have_count(5)
    expect(page.part("key-dialog")).to_be_hidden()
    page.ask("hello")
    page.wait_until_answered()
    page.close()


def test_the_text_does_not_jump_while_it_streams(page: PotluckPage, server: PageServer) -> None:
    """What is written stays where it is: no layout shift of elements that are already there."""
    page.tab.evaluate(
        "() => { window.shifts = 0; new PerformanceObserver(list => { for (const shift of list.getEntries())"
        " if (!shift.hadRecentInput && shift.sources.some(s => s.node?.parentElement?.closest?.('.chat'))) window.shifts += shift.value; })"
        ".observe({type: 'layout-shift'}); }"
    )
    server.script.answer = "\n\n".join(f"Line {number} of a short answer." for number in range(8))
    page.ask("hello")
    page.wait_until_answered()
    assert page.tab.evaluate("window.shifts") < 0.02


def test_a_reader_who_scrolled_up_is_left_in_peace(page: PotluckPage, server: PageServer) -> None:
    server.script.answer = "\n\n".join(f"Paragraph {number}." for number in range(120))
    server.script.hold_after = 150
    page.ask("much text")
    page.wait_until_written("Paragraph 49.")
    page.part("log").evaluate("log => { log.scrollTop = 100; }")
    expect(page.tab.get_by_role("button", name="Jump to the newest text")).to_be_visible()
    server.release()
    page.wait_until_answered()
    assert page.part("log").evaluate("log => log.scrollTop") == 100
    page.tab.get_by_role("button", name="Jump to the newest text").click()
    assert page.part("log").evaluate("log => log.scrollHeight - log.scrollTop - log.clientHeight") <= 1


def test_an_edit_while_the_answer_runs_leaves_one_answer_that_can_be_stopped(
    page: PotluckPage, server: PageServer
) -> None:
    server.script.hold_after = 12
    page.ask("first wording")
    page.wait_until_written("A potluck is a meal")
    page.part("question").hover()
    page.part("edit").click()
    page.part("question").get_by_role("textbox").fill("second wording")
    page.part("question").get_by_role("textbox").press("Enter")
    expect(page.part("question-text")).to_have_text("second wording")
    page.wait_until_written("A potluck is a meal")
    expect(page.part("stop")).to_be_visible()
    page.part("stop").click()
    expect(page.answers.last).to_have_attribute("data-status", "stopped")
    expect(page.answers).to_have_count(1)


def test_a_conversation_deleted_while_it_is_answered_stays_deleted(page: PotluckPage, server: PageServer) -> None:
    server.script.hold_after = 12
    page.ask("delete me")
    page.wait_until_written("A potluck is a meal")
    page.part("conversation").first.get_by_role("button").last.click()
    expect(page.part("chat-empty")).to_be_visible()
    server.release()
    page.tab.reload()
    expect(page.part("swarm-name")).to_have_text("Willow Street")
    expect(page.part("history").get_by_test_id("conversation")).to_have_count(0)


def test_an_answer_cut_off_by_a_reload_is_kept_as_far_as_it_came(page: PotluckPage, server: PageServer) -> None:
    server.script.hold_after = 12
    page.ask("reload me")
    page.wait_until_written("A potluck is a meal")
    page.tab.reload()
    page.part("conversation").first.get_by_role("button").first.click()
    page.wait_until_written("A potluck is a meal")
    expect(page.answers.last).to_have_attribute("data-status", re.compile("stopped|failed"))
