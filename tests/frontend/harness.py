"""Runs a real frontend in this process, behind real gRPC, before a fake core."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from grpc import aio

from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.main import Frontend
from scheduler_svc.frontend.tracing import Tracing
from shared.pb import core_pb2, generation_pb2_grpc
from shared.pb import generation_pb2 as pb
from shared.rpc import make_channel
from tests.frontend.fake_core import Answer, FakeCore, until
from tests.patience import PATIENCE_S


@dataclass
class Served:
    """What a test talks to."""

    core: FakeCore
    frontend: Frontend
    channel: aio.Channel
    stub: Any

    async def idle(self) -> None:
        """Waits until no per-request map holds anything: the end of every test."""
        await until(lambda: self.frontend.link.held == 0 and self.frontend.service.live == 0)


@asynccontextmanager
async def serving(
    model: Path,
    answer: Callable[[core_pb2.Submit], Answer] | None = None,
    tracing: Tracing | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A frontend that is ready, and checks at the end that every request is forgotten."""
    with tempfile.TemporaryDirectory() as scratch:
        socket = Path(scratch) / "core"
        async with FakeCore(socket, answer) as core:
            frontend = Frontend(FrontendConfig(model, socket, **settings), tracing)
            await frontend.start()
            await until(lambda: frontend.link.state is not None)
            async with make_channel(f"127.0.0.1:{frontend.port}") as channel:
                served = Served(core, frontend, channel, generation_pb2_grpc.GenerationServiceStub(channel))
                try:
                    yield served
                    await served.idle()
                finally:
                    await frontend.stop()


async def collect(call: Any) -> list[pb.GenerateResponse]:
    """All responses of a stream."""
    return [response async for response in call]


async def rest(call: Any) -> list[pb.GenerateResponse]:
    """All responses of a stream that read() was called on."""
    responses = []
    while (response := await call.read()) is not aio.EOF:
        responses.append(response)
    return responses


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Runs one scenario in an event loop of its own, of the kind that the process uses."""
    uvloop.run(asyncio.wait_for(scenario, PATIENCE_S))
