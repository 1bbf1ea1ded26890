"""The core between a frontend that may send anything and a worker that is right: what it accepts must be served.

The worker is two: the real one's fold, which refuses what is out of bounds, and the reference, which computes.
"""

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine import Engine
from scheduler_svc.worker_client import WorkerLink
from shared.dialer import Dialer
from shared.framing import FramingError, read_message, write_message
from shared.pb import core_pb2, worker_pb2
from shared.security import ClientSecurity
from shared.types import StepPlan, WorkerDescription
from shared.wire import plan_from_pb, plan_to_pb
from tests.core.reference_worker import VOCABULARY_SIZE, ReferenceWorker
from tests.patience import PATIENCE_S
from worker_svc.runner.batch import BatchState, Limits

BLOCKS, BLOCK, SLOTS, LENGTH = 16, 2, 4, 24
DESCRIPTION = WorkerDescription("f", "m", "none", BLOCK, BLOCKS, LENGTH, VOCABULARY_SIZE, (0,), 1, SLOTS, 16, "0", "x")
LIMITS = Limits(SLOTS, 16, LENGTH, BLOCK, BLOCKS, VOCABULARY_SIZE)
LAST = (1 << 32) - 1


class RightWorker(WorkerLink):
    """Executes each plan in the next turn of the loop."""

    def begin(self, engine: Engine) -> None:
        """Its stream is open."""
        self._engine = engine
        self._state, self._reference = BatchState(LIMITS), ReferenceWorker(BLOCKS, BLOCK, SLOTS)
        engine.events.described(self.group, DESCRIPTION)
        self.is_connected = True
        self._execute(engine.events.opened(self.group, DESCRIPTION))
        engine.events.connected(self.group)

    def send(self, plan: StepPlan) -> None:
        super().send(plan)
        asyncio.get_running_loop().call_soon(self._answer, plan)

    def _answer(self, plan: StepPlan) -> None:
        self.outstanding.popleft()
        try:
            self._execute(plan)
        except Exception as error:
            self._engine.broke(error)

    def _execute(self, plan: StepPlan) -> None:
        data = plan_to_pb(plan, 1).SerializeToString()
        received = plan_from_pb(worker_pb2.StepPlan.FromString(data))
        self._state.inputs(self._state.fold(received))
        self._engine.events.result(self.group, self._reference.execute(received))


class CoreEdge:
    """One core process's parts, for as many connections as are made to it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._scratch = TemporaryDirectory()
        self._socket = str(Path(self._scratch.name) / "core")
        config = SchedulerConfig(Path(), ("127.0.0.1:1",))
        self._engine = Engine(config, "f", scheduler=1, instance=1, hash_seed=1)
        self._engine.workers.links[0] = RightWorker(
            0, "", self._engine, Dialer(ClientSecurity()), instance=1, step_timeout=1.0
        )
        self._running: asyncio.Task[None] | None = None

    def take(self, payloads: list[bytes]) -> list[core_pb2.CoreMessage]:
        """One connection that sends these messages; all that it was told. Raises what would end the core."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._take(payloads), PATIENCE_S))
        except BaseException:
            self._loop.run_until_complete(_cancelled(asyncio.all_tasks(self._loop)))
            self.__init__()  # type: ignore[misc]  # as its parent would
            raise

    async def _start(self) -> None:
        async def no_dialling() -> None:
            await asyncio.Event().wait()

        self._engine.workers.run = no_dialling  # type: ignore[method-assign]
        self._running = asyncio.create_task(self._engine.run(self._socket))
        await asyncio.sleep(0)
        while not Path(self._socket).exists():
            await asyncio.sleep(0.001)
        worker = self._engine.workers.links[0]
        assert isinstance(worker, RightWorker)
        worker.begin(self._engine)

    async def _take(self, payloads: list[bytes]) -> list[core_pb2.CoreMessage]:
        if self._running is None:
            await self._start()
        assert self._running is not None
        reader, writer = await asyncio.open_unix_connection(self._socket)
        told: list[core_pb2.CoreMessage] = []
        question = core_pb2.FrontendMessage(stats_question=core_pb2.StatsQuestion(question=LAST))
        for payload in (*payloads, question.SerializeToString()):
            write_message(writer, payload)
        try:
            while (answer := await read_message(reader)) is not None:
                told.append(core_pb2.CoreMessage.FromString(answer))
                if told[-1].stats_answer.question == LAST:
                    break
            for _ in range(2 * LENGTH):  # the steps of whatever was accepted
                await asyncio.sleep(0)
        except (FramingError, ConnectionError):
            pass  # refused: the frontend comes back
        writer.close()
        while self._engine.held and not self._running.done():
            await asyncio.sleep(0)
        if self._running.done():
            self._running.result()
        self._engine.check_invariants()
        return told


async def _cancelled(tasks: set[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
