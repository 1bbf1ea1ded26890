"""WorkerService over gRPC: describes the group, takes plans off the event loop and sends results back."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import structlog

from shared.errors import InvalidRequest, LeaseHeld, TandemError, Unavailable
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.types import WorkerDescription
from shared.wire import description_to_pb
from worker_svc.plan_stream import Lease, PlanStream
from worker_svc.step_threads import StepThreads

_log = structlog.get_logger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Calls wait until `serve` has given it a warm group."""

    def __init__(self, lease_timeout_s: float) -> None:
        self._lease_timeout_s = lease_timeout_s
        self._warm: asyncio.Future[tuple[StepThreads, WorkerDescription]] = asyncio.Future()
        self.lease = Lease()
        self.draining = False
        """Results say so, and no new stream may open."""

    def serve(self, threads: StepThreads, description: WorkerDescription) -> None:
        """From now on calls are answered."""
        self._warm.set_result((threads, description))

    async def Describe(self, request: worker_pb2.DescribeRequest, context: Any) -> worker_pb2.DescribeResponse:
        """Answers once the group is warm."""
        _, description = await asyncio.shield(self._warm)
        return description_to_pb(replace(description, draining=self.draining))

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        """Answers once no scheduler holds the group."""
        self.draining = True
        await self.lease.released()
        return worker_pb2.DrainResponse()

    async def Execute(
        self, request_iterator: AsyncIterator[worker_pb2.StepPlan], context: Any
    ) -> AsyncIterator[worker_pb2.StepResult]:
        """One epoch: from its first plan to the end of the stream, an error, or silence."""
        threads, _ = await asyncio.shield(self._warm)
        stream = PlanStream(self._lease_timeout_s)
        reading = asyncio.create_task(self._read(request_iterator, stream, threads))
        try:
            async for result in stream.answers():
                result.draining = self.draining
                yield result
        except (LeaseHeld, Unavailable):
            raise  # a scheduler that waits for its turn asks several times a second, and logs why by itself
        except TandemError as error:
            _log.warning("plan stream ended", problem=str(error))
            raise
        finally:
            reading.cancel()
            stream.release()
            self.lease.release(stream)

    async def _read(
        self, messages: AsyncIterator[worker_pb2.StepPlan], stream: PlanStream, threads: StepThreads
    ) -> None:
        """Until the scheduler closes its side, or sends what is no plan of this stream."""
        try:
            async for plan in messages:
                await stream.receive(plan)
                if not self.lease.is_held_by(stream):
                    self._take_lease(stream, plan)
                threads.put(stream, plan)
            stream.close()
        except TandemError as error:
            stream.end(error)
        except Exception as error:
            stream.end(InvalidRequest("plan", f"can't be read: {error!r}"))

    def _take_lease(self, stream: PlanStream, first: worker_pb2.StepPlan) -> None:
        if self.draining:
            raise Unavailable("the worker is shutting down")
        self.lease.take(stream, first.instance, first.epoch)
