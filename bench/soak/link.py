"""A TCP proxy that can be cut, stalled and slowed: a network between a scheduler and a worker. Knows no protocol."""

import asyncio
from contextlib import suppress

CHUNK_BYTES = 1 << 16


class Link:
    """Listens on `port` and passes all to `target`, both on `host`."""

    def __init__(self, host: str, port: int, target: int) -> None:
        self.there, self.back = asyncio.Event(), asyncio.Event()
        """Set where this way passes. Else what comes waits, as at a black hole that goes away before TCP gives up."""
        self.delay_s = 0.0
        self.is_cut = False
        """New connections are refused."""
        self._host, self.port, self.target = host, port, target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

        self.mend()

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_server(self._accept, self._host, self.port)

    async def close(self) -> None:
        """Ends everything."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def mend(self) -> None:
        """All passes again."""
        self.is_cut, self.delay_s = False, 0.0
        self.there.set()
        self.back.set()

    def cut(self) -> None:
        """Resets all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        self._writers.add(writer)
        try:
            if self.is_cut:
                return
            there, back = await asyncio.open_connection(self._host, self.target)
            ends.append(back)
            self._writers.add(back)
            ways = [
                asyncio.create_task(self._pass(reader, back, self.there)),
                asyncio.create_task(self._pass(there, writer, self.back)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except OSError:
            pass  # nobody listens: the caller's connection ends, too
        finally:
            for end in ends:
                self._writers.discard(end)
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passing: asyncio.Event) -> None:
        """One way, in order. A delay is added to each piece that is read, so that it also slows what is much."""
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await passing.wait()
                writer.write(data)
                await writer.drain()
