"""A TCP link that can be cut: from then on nothing passes and nobody is told, as in a network that drops packets.

Connections are still accepted, by the kernel; they are as silent as the others.
"""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

from tests.patience import PATIENCE_S


class Relays:
    """Links of one test, served by a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In the thread; its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def link(self, target: str) -> "Relay":
        """A new one to host:port."""
        relay = Relay(self, target)
        self.run(relay.start())
        return relay

    def close(self) -> None:
        """Ends all of them."""
        self.run(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


class Relay:
    """One link; `endpoint` stands for its target."""

    def __init__(self, relays: Relays, target: str) -> None:
        self.endpoint = ""
        self._relays = relays
        self._target = target
        self._passes = asyncio.Event()
        self._refuses = False
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listens."""
        self._passes.set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Nothing passes."""
        self._relays.run(self._set(False))

    def refuse(self) -> None:
        """Connections end, and no new one begins."""
        self._relays.run(self._refuse())

    def mend(self) -> None:
        """Everything passes, also what was held back."""
        self._relays.run(self._set(True))

    async def _set(self, passes: bool) -> None:
        self._refuses = False
        (self._passes.set if passes else self._passes.clear)()

    async def _refuse(self) -> None:
        self._refuses = True
        for writer in self._open:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        self._open.add(writer)
        try:
            await self._onward(reader, writer)
        finally:
            self._open.discard(writer)

    async def _onward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await self._passes.wait()
            try:
                onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
            except OSError:
                writer.transport.abort()
                return
            await asyncio.gather(self._pump(reader, onward_writer), self._pump(onward_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The end of one side is the end of the other: a process that is killed resets its connections."""
        try:
            while data := await reader.read(1 << 16):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
            await self._passes.wait()
        finally:
            writer.transport.abort()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
