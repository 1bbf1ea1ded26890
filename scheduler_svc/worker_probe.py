"""Whether any worker answers, asked by a scheduler that must not take one: it calls Describe and opens no stream.

Knows the wire; decides nothing. A worker that answers is free to restart beside the scheduler that has it.
"""

import asyncio
from collections.abc import Callable

from grpc import aio

from scheduler_svc.config import SchedulerConfig
from shared.decoding import decoded
from shared.dialer import Dialer
from shared.errors import ProtocolError
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.resolve import is_name, named, resolve
from shared.types import WorkerDescription
from shared.wire import description_from_pb

PROBE_S = 0.5
"""Between two rounds."""
ANSWER_S = 1.0
"""That a worker may take to answer."""


class WorkerProbe:
    """Asks while it is wanted."""

    def __init__(self, config: SchedulerConfig, fits: Callable[[WorkerDescription], bool]) -> None:
        """`fits`: whether this scheduler could use such a worker."""
        self.reaches = False
        """Any answered in the last round, and fits."""
        self._fits = fits
        self._dialers = {
            target: Dialer(named(config.worker_security, target), as_child=True) for target in config.workers
        }
        self._wanted = asyncio.Event()

    def want(self, wanted: bool) -> None:
        """Whether to ask from now on."""
        if wanted:
            self._wanted.set()
        else:
            self._wanted.clear()
            self.reaches = False

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._wanted.wait()
            rounds = await asyncio.gather(*(self._any_answers(*target) for target in self._dialers.items()))
            self.reaches = self._wanted.is_set() and any(rounds)
            await asyncio.sleep(PROBE_S)

    async def _any_answers(self, target: str, dialer: Dialer) -> bool:
        found = [target]
        if is_name(target):
            try:
                found = await resolve(target)
            except OSError:
                return False
        return any(await asyncio.gather(*(self._answers(endpoint, dialer) for endpoint in found)))

    async def _answers(self, endpoint: str, dialer: Dialer) -> bool:
        question = worker_pb2.DescribeRequest()
        async with dialer.channel(endpoint) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            try:
                answer = decoded(await stub.Describe(question, timeout=ANSWER_S, metadata=dialer.metadata))
            except (aio.AioRpcError, ProtocolError):
                return False
        return self._fits(description_from_pb(answer))
