"""The swarm on the page: layers, pipeline, losses, failovers, joins, the chaos button, invites, clients."""

import msgspec
from playwright.sync_api import Browser, expect

from potluck.testing.page_server import PageServer, Script
from potluck.testing.scripted_swarm import LARGE, ScriptedSwarm, node_id
from tests.browser.page_objects import PotluckPage

KITCHEN, ANNA, BEN, ATTIC, GRANDMA = (node_id(number) for number in range(5))


def test_the_strip_shows_who_holds_which_layers(page: PotluckPage) -> None:
    assert page.shards() == {
        (KITCHEN, 0, 9, "serving"), (ANNA, 10, 19, "serving"), (BEN, 20, 29, "serving"), (ATTIC, 10, 29, "spare"),
        (GRANDMA, 0, 14, "loadable"),
    }  # fmt: skip
    assert page.coverage() == [(0, 9, 1), (10, 29, 2)]
    expect(page.part("verdict")).to_have_attribute("data-answer", "yes")


def test_bars_stand_under_their_layers(page: PotluckPage) -> None:
    track = page.node("strip-row", BEN).locator(".track").bounding_box()
    bar = page.node("strip-row", BEN).get_by_test_id("shard").bounding_box()
    assert track is not None
    assert bar is not None
    assert abs((bar["x"] - track["x"]) / track["width"] - 20 / 30) < 0.01
    assert abs(bar["width"] / track["width"] - 10 / 30) < 0.01


def test_a_gap_is_named_with_what_would_fix_it(page: PotluckPage, server: PageServer) -> None:
    page.part("model").select_option(LARGE)
    expect(page.part("verdict")).to_have_attribute("data-answer", "no")
    expect(page.part("missing")).to_contain_text("8–14")
    expect(page.part("verdict")).to_contain_text("potluck join")
    assert (8, 14, 0) in page.coverage()
    server.do(lambda swarm: swarm.join())
    expect(page.part("verdict")).to_have_attribute("data-answer", "yes")
    expect(page.news("joined")).to_contain_text("garage")
    expect(page.part("node-card")).to_have_count(6)
    assert page.coverage() == [(0, 27, 1)]


def test_the_pipeline_of_my_answer_is_shown_with_its_times(page: PotluckPage, server: PageServer) -> None:
    server.script.hold_after = 20
    page.ask("hello")
    expect(page.part("stage")).to_have_count(3)
    expect(page.part("request-facts")).to_contain_text("your answer")
    expect(page.part("request-facts")).to_contain_text("36.4 tokens/s")
    expect(page.node("stage", ANNA)).to_contain_text("10–19")
    expect(page.node("stage", ANNA).get_by_role("img")).to_have_attribute(
        "aria-label", "compute 3.4 ms, queue 0.3 ms, wire 0.4 ms"
    )
    expect(page.part("hop")).to_have_count(3)  # to anna, to ben, home again
    server.release()
    page.wait_until_answered()
    expect(page.part("hop")).to_have_count(0)
    expect(page.part("request-facts")).to_contain_text("the last answer")
    expect(page.part("stage")).to_have_count(3)  # still there to be read


def test_a_lost_machine_disappears_and_is_reported(page: PotluckPage, server: PageServer) -> None:
    server.do(lambda swarm: swarm.lose(ANNA))
    expect(page.node("strip-row", ANNA)).to_have_count(0)
    expect(page.node("seat", ANNA)).to_have_count(0)
    expect(page.node("node-card", ANNA)).to_have_attribute("data-state", "lost")
    expect(page.news("lost")).to_contain_text("anna stopped answering")
    assert page.coverage() == [(0, 19, 1), (20, 29, 2)]
    server.do(lambda swarm: swarm.forget(ANNA))
    expect(page.node("node-card", ANNA)).to_have_count(0)


def test_memory_version_and_last_contact_are_on_the_card(page: PotluckPage) -> None:
    card = page.node("node-card", BEN)
    expect(card).to_contain_text("model 9.1 GiB")
    expect(card).to_contain_text("KV cache 1.7 GiB")
    expect(card).to_contain_text("free 21.2 GiB")
    expect(card).to_contain_text("v0.2.0")
    expect(card).to_contain_text("seen now")


def test_the_chaos_button_kills_a_shard_and_the_text_stays_identical(page: PotluckPage, server: PageServer) -> None:
    expect(page.part("chaos")).to_be_disabled()
    server.script.hold_after = 20
    page.ask("kill me")
    page.wait_until_written("A potluck is a meal")
    page.part("chaos").click()
    expect(page.answers.last.get_by_test_id("chaos-verdict")).to_contain_text("ben-desktop")
    server.release()
    expect(page.answers.last.get_by_test_id("failover-note")).to_contain_text(
        "Lost layers 20–29 on ben-desktop; the answer went on after 184 ms."
    )
    expect(page.news("failover")).to_contain_text("attic took over from ben-desktop")
    assert page.wait_for_verdict() == "identical"
    expect(page.answers.last.get_by_test_id("chaos-verdict")).to_contain_text("not one of them changed")
    expect(page.answers.last.get_by_test_id("chaos-verdict")).to_contain_text("paused for 184 ms")
    expect(page.answers.last.get_by_test_id("answer-facts")).to_contain_text("1 failover, 184 ms pause")
    assert server.bodies[0] == server.bodies[1]  # seed included


def test_a_changed_text_is_called_different(page: PotluckPage, server: PageServer) -> None:
    server.script.hold_after, server.script.differs_when_repeated = 20, True
    page.ask("kill me")
    page.wait_until_written("A potluck is a meal")
    page.part("chaos").click()
    expect(page.answers.last.get_by_test_id("chaos-verdict")).to_contain_text("ben-desktop")
    server.release()
    assert page.wait_for_verdict() == "different"
    expect(page.answers.last.get_by_test_id("chaos-verdict")).to_contain_text("Different from character 41 on.")


def test_without_chaos_there_is_no_chaos_button(browser: Browser) -> None:
    with PageServer(ScriptedSwarm(has_chaos=False), Script(hold_after=12)) as server:
        page = PotluckPage.open(browser, server.base_url)
        page.ask("hello")
        page.wait_until_written("A potluck is a meal")
        expect(page.part("chaos")).to_be_hidden()
        server.release()
        page.wait_until_answered()
        page.close()


def test_an_invite_gives_a_command_to_copy(page: PotluckPage) -> None:
    page.part("invite-open").click()
    page.part("invite-make").click()
    expect(page.part("invite-command")).to_have_text("potluck join potluck-7f3k9q")


def test_the_client_panel_has_ready_settings(page: PotluckPage, server: PageServer) -> None:
    page.part("clients-open").click()
    expect(page.part("client-url")).to_have_text(f"{server.base_url}/v1")
    names = page.part("client-choice").locator("option").all_text_contents()
    assert len(names) >= 10
    for name in names:
        page.part("client-choice").select_option(name)
        expect(page.part("client-text")).to_contain_text("127.0.0.1")


def test_the_page_finds_its_way_back_after_the_node_was_away(browser: Browser) -> None:
    with PageServer() as server:
        port = int(server.base_url.rsplit(":", 1)[1])
        page = PotluckPage.open(browser, server.base_url)
        page.expected_errors = ["ERR_"]
    expect(page.part("offline")).to_be_visible()
    with PageServer(port=port) as server:
        server.do(lambda swarm: swarm.join())
        expect(page.part("offline")).to_be_hidden(timeout=15_000)
        expect(page.part("node-card")).to_have_count(6)
        page.close()


def test_layers_that_are_asleep_are_shown_so_and_not_as_a_gap(page: PotluckPage, server: PageServer) -> None:
    server.do(lambda swarm: swarm.forget(KITCHEN))
    asleep = page.part("coverage").first
    expect(asleep).to_have_text("asleep")
    expect(asleep).to_have_attribute("aria-label", "layers 0–9: asleep, somebody loads them when asked")


def test_a_label_that_has_no_room_is_left_out_rather_than_broken(phone: PotluckPage, server: PageServer) -> None:
    def narrow(swarm: ScriptedSwarm) -> None:
        [shard] = swarm.nodes[ANNA].shards
        swarm.nodes[ANNA] = msgspec.structs.replace(
            swarm.nodes[ANNA], shards=(msgspec.structs.replace(shard, first=18),)
        )

    phone.part("view-swarm").click()
    expect(phone.node("strip-row", ANNA).locator(".range")).to_be_visible()
    server.do(narrow)
    expect(phone.node("strip-row", ANNA).locator(".range")).to_be_hidden()
