"""Who asked, as the metrics name it (HearthNet §5.8): known by id, and never more names than a page can hold."""

from types import SimpleNamespace
from typing import Any

import pytest

from potluck.identity.keys import NodeKey
from potluck.net.memory import MemoryNetwork
from potluck.node.node import Node
from potluck.wire.messages import Open, Stage, Wiring
from tests.support.link_ends import run_test


def test_callers_are_counted_by_id_and_after_many_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        key = NodeKey.generate()
        node = Node(key, MemoryNetwork().transport(key.node_id))
        shard: Any = SimpleNamespace(deliver=lambda sender, message, body: None)
        monkeypatch.setattr(node, "_server_for", lambda message: shard)
        callers = [number.to_bytes(32, "big") for number in range(1 << 240, (1 << 240) + 1100)]
        ids = [bytes(reversed(caller)) for caller in callers]
        for caller in (*ids, ids[0]):
            session = caller[:16]
            wiring = Wiring(None, None, None, None, 0, 1)
            node._on_message(caller, Open(session, 0, "m", "a" * 64, 1, Stage(0, 1), 1, wiring), b"")
        counted = {
            sample.labels["caller"]: sample.value
            for family in node.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "distributed_inference_requests_total"
        }
        assert (len(counted), counted["others"], counted[ids[0].hex()[:16]]) == (1025, 76.0, 2.0)
        await node.stop()

    run_test(main())
