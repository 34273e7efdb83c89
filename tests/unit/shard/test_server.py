"""What a served shard knows of its loading. No worker: its messages are what a test says."""

from potluck.core.errors import OutOfDeviceMemory, ShardUnavailable
from potluck.shard.server import ShardServer
from potluck.telemetry.metrics import Metrics
from potluck.wire.messages import Stage
from potluck.wire.work import Loaded, LoadFailed
from potluck.wire.worker_settings import WorkerSettings
from tests.support.link_ends import run_test
from tests.support.shard_cores import settings_of

STAGE = Stage(0, 4, True, False)


def test_why_it_could_not_be_loaded_is_known_until_it_could() -> None:
    async def main() -> None:
        worker = WorkerSettings(model_path="nowhere", source="a" * 64)
        server = ShardServer(bytes(32), settings_of(STAGE), worker, lambda messages: None, Metrics())
        assert server.load_failure is None
        server._on_worker_message(LoadFailed(STAGE, "out_of_device_memory", "others took it"), b"")
        assert isinstance(server.load_failure, OutOfDeviceMemory)
        assert not (await server.health()).online
        server._on_worker_message(LoadFailed(STAGE, "weights_missing", "the file is gone"), b"")
        assert isinstance(server.load_failure, ShardUnavailable)
        assert "the file is gone" in str(server.load_failure)
        server._on_worker_message(Loaded(STAGE, 1, 1, 1), b"")
        assert server.load_failure is None
        await server.evict()
        assert (await server.health()).online, "it sleeps, and loads at the next question"
        await server.stop()

    run_test(main())
