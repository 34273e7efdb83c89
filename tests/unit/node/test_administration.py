"""What the page's buttons do to a node that is not there, and what a reader of events leaves behind."""

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from potluck.core.errors import BadRequest
from potluck.gateway.administration import _events, add_administration
from potluck.gateway.app import build_app
from potluck.gateway.guarding import GuardSettings
from potluck.gateway.page_state import ApiFacts, ChaosRequest, PageState, SwarmFacts
from potluck.gateway.responding import Service, ServiceSettings
from potluck.identity.keys import short_id
from potluck.node.administration import NodeAdministration
from potluck.node.swarm_node import News
from potluck.swarm.duplicates import Duplicate
from potluck.swarm.view import Seen, View
from potluck.testing.memory_answering import MemoryAnswering
from potluck.wire.messages import Chaos
from tests.support.api import post, with_client
from tests.support.link_ends import run_test
from tests.support.swarm_records import KEYS, advert

OWN, OTHER = KEYS[0].node_id, KEYS[1].node_id


def administration(view: View, sent: list[tuple[bytes, object]]) -> NodeAdministration:
    links = SimpleNamespace(send=lambda node, address, message: sent.append((node, message)))
    swarm: Any = SimpleNamespace(
        view=view, node=SimpleNamespace(links=links, id=OWN, transport=None), on_news=[], on_changed=[]
    )
    return NodeAdministration(swarm, "http://127.0.0.1:1", needs_key=False, allows_chaos=True, on_left=lambda: None)


def two_nodes(is_connected: bool = True, duplicates: tuple[Duplicate, ...] = ()) -> View:
    seen = {OTHER: Seen(advert(KEYS[1]), 0.0, 120.0, is_connected=is_connected)}
    return View(OWN, 0.0, 1, seen, duplicates=duplicates)


def test_chaos_hits_a_node_that_is_there_and_is_refused_for_anything_else() -> None:
    async def main() -> None:
        sent: list[tuple[bytes, object]] = []
        there = administration(two_nodes(), sent)
        assert (await there.chaos(ChaosRequest(node=OTHER.hex()))).killed == OTHER.hex()
        assert sent == [(OTHER, Chaos(0))]
        for name in ("rubbish", "zz" * 32, KEYS[2].node_id.hex(), OTHER.hex()[:10]):
            with pytest.raises(BadRequest, match="no such node"):
                await there.chaos(ChaosRequest(node=name))
        with pytest.raises(BadRequest, match="no such node"):
            await administration(two_nodes(is_connected=False), sent).chaos(ChaosRequest(node=OTHER.hex()))
        assert len(sent) == 1

    run_test(main())


def test_without_the_switch_chaos_is_denied() -> None:
    """Not `experimental_disabled`: that means that the node takes no part at all."""
    calm: Any = SimpleNamespace(allows_chaos=False)
    service = Service(MemoryAnswering(), ServiceSettings())
    app = build_app(service, GuardSettings(), lambda app: add_administration(app, calm))
    response = post(app, "/potluck/chaos", {})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "access_denied")


def test_ids_that_two_machines_use_are_told() -> None:
    twin = Duplicate(OTHER, (("10.0.0.1:1",), ("10.0.0.2:1",)))
    told = administration(two_nodes(duplicates=(twin,)), [])._duplicates()
    assert told == [{"id": OTHER.hex(), "addresses": (("10.0.0.1:1",), ("10.0.0.2:1",))}]


class Watched(NodeAdministration):
    """With a state that never changes."""

    def state(self) -> PageState:
        return PageState(SwarmFacts("", "", ""), 0, (), (), (), (), None, False, ApiFacts("", False))

    def recent_news(self) -> tuple[Any, ...]:
        return ()


def test_a_reader_of_events_that_goes_away_is_not_told_any_more() -> None:
    async def main() -> None:
        swarm: Any = SimpleNamespace(node=SimpleNamespace(transport=None), on_news=[], on_changed=[])
        node = Watched(swarm, "", needs_key=False, allows_chaos=False, on_left=lambda: None)
        readers = [_events(node) for _ in range(3)]
        for reader in readers:
            assert b"event: state" in await anext(reader)
        assert len(swarm.on_news) == len(swarm.on_changed) == 3
        waiting = asyncio.ensure_future(anext(readers[0]))
        await asyncio.sleep(0)
        waiting.cancel()  # while it waits for news
        await asyncio.gather(waiting, return_exceptions=True)
        await readers[1].aclose()  # type: ignore[attr-defined]
        del readers, reader  # while what it said last is being sent
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert swarm.on_news == swarm.on_changed == []

    run_test(main())


def test_ollamas_clients_find_their_sign_of_life_where_browsers_find_the_page_and_head_ends() -> None:
    app = FastAPI()
    add_administration(app, administration(two_nodes(), []))

    async def ask(client: httpx.AsyncClient) -> None:
        assert (await client.get("/", headers={"Accept": "*/*"})).text == "Ollama is running"
        assert "<html" in (await client.get("/", headers={"Accept": "text/html"})).text
        assert (await asyncio.wait_for(client.head("/potluck/events"), 5)).status_code == 200

    with_client(app, ask)


def test_news_names_machines_as_people_know_them_also_when_they_have_gone() -> None:
    view = View(OWN, 0.0, 1, {OTHER: Seen(advert(KEYS[1], name="ben"), 0.0, 120.0)})
    told = administration(view, [])
    swarm: Any = told._swarm
    swarm.news = [News(1.0, "joined", OTHER, ""), News(2.0, "joined", KEYS[2].node_id, "")]
    assert [item.text for item in told.recent_news()] == ["ben joined", f"{short_id(KEYS[2].node_id)} joined"]
    swarm.view, swarm.news = View(OWN, 0.0, 2, {}), [News(3.0, "lost", OTHER, "")]
    assert told.recent_news()[0].text == "ben is lost"
