"""The core's end of the frontends' sockets for benchmarks: one token for each sequence and step, at a set pace."""

import asyncio
from pathlib import Path

import numpy as np

from shared.framing import read_message, write_message
from shared.pb import core_pb2
from shared.wire import pack

_MODEL = core_pb2.ServedModel(dtype="float32", context_limit=1 << 20, vocabulary_size=512, eos_token_ids=[511])


class TokenSource:
    """Accepts frontends and their sequences; run() feeds all of them."""

    def __init__(self, token_id: int) -> None:
        """`token_id` is what every sequence gets, again and again."""
        self._token_id = token_id
        self._handles: dict[asyncio.StreamWriter, list[int]] = {}
        self._arrived = asyncio.Event()

    async def submitted(self, sequences: int) -> None:
        """Waits until so many are there."""
        while sum(len(handles) for handles in self._handles.values()) < sequences:
            self._arrived.clear()
            await self._arrived.wait()

    async def serve(self, path: Path) -> asyncio.Server:
        """Listens on a Unix socket."""
        return await asyncio.start_unix_server(self._accept, path, limit=1 << 20)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handles = self._handles[writer] = []
        state = core_pb2.CoreState(active=True, progressing=True, model=_MODEL)
        write_message(writer, core_pb2.CoreMessage(state=state).SerializeToString())
        while (payload := await read_message(reader)) is not None:
            message = core_pb2.FrontendMessage.FromString(payload)
            if message.WhichOneof("kind") == "submit":
                handles.append(message.submit.handle)
                self._arrived.set()
        del self._handles[writer]

    async def run(self, seconds: float, rate: float) -> None:
        """Steps for so long, `rate` a second or, if 0, as fast as the frontends read; then ends all sequences."""
        batches = {writer: self._step(handles) for writer, handles in self._handles.items() if handles}
        loop = asyncio.get_running_loop()
        start, steps = loop.time(), 0
        while (now := loop.time()) < start + seconds:
            if rate and now < start + steps / rate:
                await asyncio.sleep(start + steps / rate - now)
            for writer, payload in batches.items():
                write_message(writer, payload)
                if not rate:
                    await writer.drain()
            steps += 1
        self._end()

    def _step(self, handles: list[int]) -> bytes:
        batch = core_pb2.TokenBatch(
            handles=pack(np.array(handles, dtype=np.int32)),
            token_ids=pack(np.full(len(handles), self._token_id, dtype=np.int32)),
        )
        return core_pb2.CoreMessage(tokens=batch).SerializeToString()

    def _end(self) -> None:
        for writer, handles in self._handles.items():
            ended = [core_pb2.Ended(handle=handle, length=core_pb2.LengthReached()) for handle in handles]
            batch = core_pb2.TokenBatch(ended=ended)
            write_message(writer, core_pb2.CoreMessage(tokens=batch).SerializeToString())
            handles.clear()
