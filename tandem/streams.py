"""The streams that generate() returns: iterators over deltas that go on when a server is lost.

GenerationStream is for threads, AsyncGenerationStream for asyncio; tandem.resume decides for both.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Generic, Self

import grpc

from shared.decoding import UNDECODABLE
from shared.errors import Aborted, RequestFailed
from shared.pb import generation_pb2 as pb
from shared.rpc import REQUEST_ID
from tandem.connections import C, Connections, error_of
from tandem.resume import Patience, Progress
from tandem.values import Delta

CLOSED = "the stream was closed"


class _Stream(Generic[C]):
    """What both kinds of stream do alike: open the calls of an attempt, and judge how it ended."""

    def __init__(
        self,
        connections: Connections[C],
        request: pb.GenerateRequest,
        timeout: float | None,
        resume_timeout: float,
        queue_timeout: float,
    ) -> None:
        """`request` has an id and a seed. The first attempt begins at once."""
        self.request_id = request.request_id
        self.seed = request.sampling.seed
        """Repeats the output when given again."""
        self._connections = connections
        self._route = connections.route()
        self._progress = Progress(request)
        self._patience = Patience(time.monotonic(), resume_timeout, timeout, connections.endpoints, queue_timeout)
        if connections.come_back:
            self._patience.accepted()
        self._is_closed = False
        self._calls: list[Any] = []
        self._open()

    def _open(self) -> None:
        self._stub = next(self._route)
        timeout, metadata = self._patience.remaining(time.monotonic()), self._connections.metadata
        self._calls = [
            self._stub.Generate(request, timeout=timeout, metadata=metadata) for request in self._progress.remaining()
        ]
        if self._is_closed:  # perhaps by another thread, which knew only the calls before these
            self._cancel()

    def _take(self, response: pb.GenerateResponse | None) -> Delta:
        """None: what came can't be decoded."""
        if response is None:
            raise RequestFailed(f"the server {UNDECODABLE}")
        self._patience.progressed()
        self._connections.served()
        return self._progress.take(response)

    def _pause_after(self, error: Any) -> float:
        """Seconds until the next attempt. Raises the error that the caller must see."""
        if self._is_closed:
            raise Aborted(CLOSED)
        metadata = *(error.initial_metadata() or ()), *(error.trailing_metadata() or ())
        if any(key == REQUEST_ID for key, _ in metadata):
            self._patience.accepted()
        reason = error_of(error, self._connections.security)
        self._connections.failed(self._stub, reason)
        return self._patience.pause_after(reason, time.monotonic(), random.random())

    def _cancel(self) -> None:
        for call in self._calls:
            call.cancel()

    def close(self) -> None:
        """Ends the request at the server if it still runs."""
        self._is_closed = True
        self._cancel()


class GenerationStream(_Stream[grpc.Channel]):
    """The deltas of one request. Leaving the loop early, or close(), ends the request at the server."""

    def __init__(self, *arguments: Any) -> None:
        self._closing = threading.Event()
        super().__init__(*arguments)

    def __iter__(self) -> Iterator[Delta]:
        try:
            while True:
                try:
                    # Samples that go on alone are read one after another; the server computes them all meanwhile.
                    for call in self._calls:
                        for response in call:
                            yield self._take(response)
                    self._progress.check_finished()
                    return
                except grpc.RpcError as error:
                    self._cancel()
                    self._closing.wait(self._pause_after(error))
                self._open()
        finally:
            self.close()

    def close(self) -> None:
        """Ends the request at the server if it still runs. Any thread may call it."""
        super().close()
        self._closing.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncGenerationStream(_Stream[grpc.aio.Channel]):
    """The deltas of one request. Leaving the loop early, or close(), ends the request at the server."""

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while True:
                try:
                    for call in self._calls:
                        async for response in call:
                            yield self._take(response)
                    self._progress.check_finished()
                    return
                except grpc.RpcError as error:
                    self._cancel()
                    await asyncio.sleep(self._pause_after(error))
                except asyncio.CancelledError:
                    if self._is_closed and not _is_cancelled():
                        raise Aborted(CLOSED) from None
                    raise
                self._open()
        finally:
            self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_cancelled() -> bool:
    """Whether it is the task that is cancelled, not the call that it reads."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
