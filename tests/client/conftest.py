"""A server for the client library's tests: a real frontend before a fake core, in a thread with a loop of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from shared.pb import core_pb2
from tests.frontend.conftest import model, tokenizer
from tests.frontend.fake_core import Answer, FakeCore
from tests.frontend.harness import serving
from tests.patience import PATIENCE_S

__all__ = ["model", "tokenizer"]


class Server:
    """What a test sees of the server: its endpoint, its core, and how the core answers."""

    def __init__(self, model: Path) -> None:
        self.answer: Callable[[core_pb2.Submit], Answer] = lambda submit: ((), None)
        self.endpoint = ""
        self.core: FakeCore
        self._model = model
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with serving(self._model, lambda submit: self.answer(submit)) as served:
            self.core = served.core
            self.endpoint = f"127.0.0.1:{served.frontend.port}"
            self._ready.set()
            await self._stop.wait()

    def start(self) -> None:
        """Returns when it serves."""
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)

    def stop(self) -> None:
        """Returns when the frontend has forgotten every request."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a request is not forgotten"

    def give(self, *arguments: Any) -> None:
        """FakeCore.give from another thread."""
        self._loop.call_soon_threadsafe(self.core.give, *arguments)


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    """A running server; at the end every request must be forgotten."""
    server = Server(model)
    server.start()
    yield server
    server.stop()
