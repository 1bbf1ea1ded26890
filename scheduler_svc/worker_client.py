"""The scheduler's end of one worker group: dials, opens the plan stream, notices its loss, dials again.

Knows the wire and the clock; decides nothing about sequences. What happens is told to a WorkerListener.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

import structlog
from grpc import StatusCode, aio

from scheduler_svc.link_counts import LinkCounts
from shared.decoding import decoded
from shared.dialer import Dialer
from shared.errors import ProtocolError, StartupError, TandemError
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.security import ClientSecurity
from shared.tls import explained
from shared.types import DEPTH_LIMIT, StepPlan, StepResult, WorkerDescription
from shared.wire import description_from_pb, plan_to_pb, result_from_pb

HEARTBEAT_S = 0.5
REDIAL_S = 0.2
SMOOTHING = 0.1
DRAINED = "it is drained: to use it again, restart it"

_log = structlog.get_logger(__name__)


class Misfit(TandemError):
    """The group answers, and can't serve beside the others, or not this model."""


class _Sent(NamedTuple):
    """A plan without a result."""

    step_id: int
    at: float
    has_rows: bool
    alone: bool
    """No other was out when it was sent."""


class WorkerListener(Protocol):
    """Who decides. Each call is short and never awaits."""

    def described(self, group: int, description: WorkerDescription) -> None:
        """The group answered. Raises Misfit if it can't serve here, StartupError if that leaves nobody who could."""

    def opened(self, group: int, description: WorkerDescription) -> StepPlan:
        """A stream is being opened: the plan that opens its epoch."""

    def connected(self, group: int) -> None:
        """The worker accepted the stream: its first result was told just now."""

    def heartbeat(self, group: int) -> StepPlan:
        """No plan went out for a while: one without rows."""

    def result(self, group: int, result: StepResult) -> None:
        """A result arrived, in order."""

    def lost(self, group: int) -> None:
        """The stream that was being opened or connected is gone."""


class WorkerLink:
    """One worker group, over all its losses and returns, as long as it is wanted."""

    def __init__(
        self,
        group: int,
        endpoint: str,
        listener: WorkerListener,
        dialer: Dialer,
        *,
        instance: int,
        step_timeout: float,
    ) -> None:
        self.group = group
        self.endpoint = endpoint
        self.is_connected = False
        self.is_wanted = True
        """If not, it is dialled no more once its stream has ended."""
        self.is_refused = False
        """It answers, and can't serve here."""
        self.is_drained = False
        """Its latest stream was ended on purpose."""
        self.is_held = False
        """Another scheduler has it."""
        self.description: WorkerDescription | None = None
        """What it answered when it was dialled last; None where it did not, or can't serve here."""
        self.problem = "not reached yet"
        """Why it is not connected."""
        self.outstanding: deque[_Sent] = deque()
        """Plans without a result."""
        self.counts = LinkCounts()
        self._listener = listener
        self._dialer = dialer
        self._instance = instance
        self._step_timeout = step_timeout
        self._plans: asyncio.Queue[worker_pb2.StepPlan | None] = asyncio.Queue()
        self._last_sent = 0.0
        self._round_trip_s = 0.0
        self._step_s = 0.0

    @property
    def depth(self) -> int:
        """Plans to keep out, 2 to 4, so that the worker never waits: enough steps to cover the round trip.

        One step in execution and one waiting hide a round trip shorter than a step; a third one is worth it once the
        round trip takes more than a quarter of a step.
        """
        if self._step_s <= 0.0:
            return 2
        return min(DEPTH_LIMIT, 2 + max(0, math.ceil(self._round_trip_s / self._step_s - 0.25)))

    def send(self, plan: StepPlan) -> None:
        """Queues a plan on the open stream."""
        now = time.monotonic()
        rows = len(plan.rows)
        self.outstanding.append(_Sent(plan.step_id, now, rows > 0, not self.outstanding))
        self._last_sent = now
        message = plan_to_pb(plan, self._instance)
        self._plans.put_nowait(message)
        self.counts.sent(message.ByteSize(), rows)

    def close(self) -> None:
        """Ends the open stream: the worker is shutting down and nothing runs there any more."""
        self.is_drained = True
        self._plans.put_nowait(None)

    async def run(self) -> None:
        """Serves the group until it is lost and not wanted any more. Raises StartupError where nobody can serve."""
        while self.is_wanted:
            channel = self._dialer.channel(self.endpoint)
            try:
                await self._serve(worker_pb2_grpc.WorkerServiceStub(channel))
            except StartupError:
                raise
            except (aio.AioRpcError, TimeoutError, ValueError, ProtocolError, Misfit) as error:
                self._missed(error)
            finally:
                await channel.close()
            await asyncio.sleep(REDIAL_S)

    def _missed(self, error: Exception) -> None:
        """Logged when the reason changes: it is dialled several times a second."""
        reason = _reason(error, self._dialer.security)
        self.is_refused = isinstance(error, Misfit)
        self.is_held = isinstance(error, aio.AioRpcError) and error.code() is StatusCode.FAILED_PRECONDITION
        if not self.is_held:
            self.description = None
        if reason != self.problem:
            _log.warning("worker refused" if self.is_refused else "no worker", endpoint=self.endpoint, reason=reason)
        self.problem = reason

    async def _serve(self, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> None:
        description = await self._describe(stub)
        if description.draining:
            raise ValueError(DRAINED)
        self._listener.described(self.group, description)
        self.is_refused, self.description = False, description
        self._plans = asyncio.Queue()
        self.is_drained = False
        self.outstanding.clear()
        self.send(self._listener.opened(self.group, description))
        call = stub.Execute(self._outgoing(), metadata=self._dialer.metadata)
        beat = asyncio.create_task(self._beat())
        try:
            await self._receive(call)
        except Exception:
            self.counts.losses += self.is_connected and not self.is_drained
            raise
        finally:
            beat.cancel()
            call.cancel()
            self.is_connected = False
            self.problem = self.problem or "let go"
            self._listener.lost(self.group)

    async def _describe(self, stub: "worker_pb2_grpc.WorkerServiceAsyncStub") -> WorkerDescription:
        try:
            question, metadata = worker_pb2.DescribeRequest(), self._dialer.metadata
            answer = await stub.Describe(question, timeout=self._step_timeout, metadata=metadata)
        except aio.AioRpcError as error:
            if error.code() is StatusCode.DEADLINE_EXCEEDED:
                raise ValueError("it listens but does not answer: it loads its model, or hangs") from None
            raise
        try:
            return description_from_pb(decoded(answer))
        except ProtocolError as error:
            raise Misfit(str(error)) from None

    async def _outgoing(self) -> AsyncIterator[worker_pb2.StepPlan]:
        while (plan := await self._plans.get()) is not None:
            yield plan

    async def _beat(self) -> None:
        """Liveness is by message: a blocked peer still answers HTTP/2 pings.

        None while a plan is out, as during a long step: its result is the answer that is waited for.
        """
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            if not self.outstanding and time.monotonic() - self._last_sent >= HEARTBEAT_S:
                self.send(self._listener.heartbeat(self.group))

    async def _receive(self, call: "aio.StreamStreamCall[worker_pb2.StepPlan, worker_pb2.StepResult]") -> None:
        """Until the stream ends or falls silent: heartbeats make sure that there is always a result to wait for."""
        while True:
            async with asyncio.timeout(self._step_timeout):
                message = decoded(await call.read())
            if not isinstance(message, worker_pb2.StepResult):
                raise ValueError(DRAINED if self.is_drained else "the worker ended the plan stream")
            if message.instance != self._instance:
                continue
            self._measure(message)
            joins, self.is_connected = not self.is_connected, True
            self._listener.result(self.group, result_from_pb(message))
            if joins:
                self.problem, self.is_held = "", False
                _log.info("worker connected", endpoint=self.endpoint)
                self._listener.connected(self.group)

    def _measure(self, message: worker_pb2.StepResult) -> None:
        """Keeps `depth`'s inputs: a plan sent with none out comes back after one step and one round trip."""
        if not self.outstanding or self.outstanding[0].step_id != message.step_id:
            return  # the core refuses what is out of order
        plan, now = self.outstanding.popleft(), time.monotonic()
        step_s = message.step_time_us / 1e6
        self.counts.came(now, plan.at, step_s, message.ByteSize(), rows=plan.has_rows)
        if plan.alone and message.step_id > 1:  # the first one also waits for the stream and the epoch to open
            round_trip_s = max(0.0, now - plan.at - step_s)
            self._round_trip_s += (SMOOTHING if self._round_trip_s else 1.0) * (round_trip_s - self._round_trip_s)
        if message.token_ids:
            self._step_s += (SMOOTHING if self._step_s else 1.0) * (step_s - self._step_s)


def _reason(error: Exception, security: ClientSecurity) -> str:
    if isinstance(error, aio.AioRpcError):
        if error.code() is StatusCode.UNIMPLEMENTED:
            return "no worker answers there: --workers takes workers, and of a group over several hosts node 0 alone"
        return f"{error.code().name}: {explained(error.details() or '', security)}"
    return "no result within the step timeout" if isinstance(error, TimeoutError) else str(error)
