"""A server that stops without closing its connections is noticed in seconds, by pings that it does not answer."""

import asyncio
import signal
import tempfile
from pathlib import Path

import pytest

from scheduler_svc.frontend.config import FrontendConfig
from shared.ports import find_free
from shared.process import kill, spawn
from shared.rpc import until_serving
from shared.settings import to_json
from tandem import AsyncClient, Unavailable
from tests.frontend.fake_core import FakeCore
from tests.frontend.harness import run


def test_a_stopped_server_is_noticed_in_seconds(model: Path) -> None:
    """Without grpc.http2.ping_timeout_ms it takes a minute."""

    async def scenario() -> None:
        with tempfile.TemporaryDirectory() as scratch:
            async with FakeCore(Path(scratch) / "core") as core:
                config = FrontendConfig(model, Path(scratch) / "core", port=find_free("127.0.0.1"))
                server = spawn("scheduler_svc.frontend.main", ["--config", to_json(config)])
                try:
                    await until_serving(f"127.0.0.1:{config.port}", "readiness")
                    async with AsyncClient(f"127.0.0.1:{config.port}", resume_timeout=0) as client:
                        stream = client.generate("a")
                        waiting = asyncio.create_task(anext(aiter(stream)))
                        await core.submitted()
                        server.send_signal(signal.SIGSTOP)
                        with pytest.raises(Unavailable):
                            await asyncio.wait_for(waiting, 20)
                finally:
                    kill([server])

    run(scenario())
