"""The core process's loop without workers: what is early ends in time, and no bug leaves it alive but deaf."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine import Engine
from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.main import Frontend
from scheduler_svc.served_core import Outgrown
from scheduler_svc.worker_client import Misfit
from shared.errors import StartupError
from shared.framing import read_message, write_message
from shared.pb import core_pb2, generation_pb2_grpc, worker_pb2_grpc
from shared.pb import generation_pb2 as pb
from shared.ports import find_free
from shared.rpc import make_channel
from shared.types import StepPlan, StepResult, WorkerDescription
from shared.wire import description_to_pb
from tandem.models import model_folder
from tests.patience import PATIENCE_S
from tests.service.test_worker_client import Worker


class Peer:
    """A frontend's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def submit(self, handle: int, prompt: bytes, **fields: Any) -> None:
        """As if the frontend knew the model from an earlier core."""
        sampling = core_pb2.SequenceSampling(top_p=1.0)
        name = f"request-{handle}"
        submit = core_pb2.Submit(handle=handle, request_id=name, prompt=prompt, sampling=sampling, **fields)
        write_message(self._writer, core_pb2.FrontendMessage(submit=submit).SerializeToString())

    def mask(self, handle: int, position: int) -> None:
        mask = core_pb2.MaskReady(handle=handle, position=position, allowed=b"\xff")
        write_message(self._writer, core_pb2.FrontendMessage(mask_ready=mask).SerializeToString())

    def abort(self, request_id: str) -> None:
        question = core_pb2.AbortById(question=1, request_id=request_id)
        write_message(self._writer, core_pb2.FrontendMessage(abort_by_id=question).SerializeToString())

    async def receive(self, kind: str) -> core_pb2.CoreMessage:
        """The next message of a kind."""
        while payload := await read_message(self._reader):
            message = core_pb2.CoreMessage.FromString(payload)
            if message.WhichOneof("kind") == kind:
                return message
        raise ConnectionError("the core closed the connection")

    async def end(self) -> core_pb2.Ended:
        """The next end."""
        while not (ends := (await self.receive("tokens")).tokens.ended):
            pass
        (ended,) = ends
        return ended


@contextlib.asynccontextmanager
async def served(
    folder: Path, *, groups: int = 1, workers: tuple[str, ...] = (), **settings: float
) -> AsyncIterator[tuple[Engine, Peer, asyncio.Task[None]]]:
    workers = workers or tuple(f"127.0.0.1:{find_free('127.0.0.1')}" for _ in range(groups))
    engine = Engine(
        SchedulerConfig(model=model_folder("tiny"), workers=workers, **settings),
        "",
        scheduler=3,
        instance=1,
        hash_seed=2,
    )
    running = asyncio.create_task(engine.run(str(folder / "core.sock")))
    while not (folder / "core.sock").exists():
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_unix_connection(folder / "core.sock")
    try:
        yield engine, Peer(reader, writer), running
    finally:
        writer.close()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, ZeroDivisionError, Outgrown):
            await running


def test_requests_end_where_no_worker_ever_comes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, worker_loss_timeout=2.0, step_timeout=1.0) as (engine, peer, _):
            assert (await peer.receive("state")).state.progressing, "nothing is there to do"
            peer.submit(1, bytes(8))
            while (await asyncio.wait_for(peer.receive("state"), PATIENCE_S)).state.progressing:
                pass  # until it has waited for longer than the step timeout
            ended = await asyncio.wait_for(peer.end(), PATIENCE_S)
            assert (ended.handle, ended.failure.code) == (1, grpc.StatusCode.UNAVAILABLE.value[0])
            assert "no worker for 2 s: the scheduler's log says why" in ended.failure.message
            assert engine.held == 0

    asyncio.run(scenario())


def test_statistics_tell_before_the_first_worker_who_is_asked_and_how_many_wait(tmp_path: Path) -> None:
    """By a real frontend, where requests wait that nobody can check yet; asked for at once, not when a worker comes."""

    async def scenario() -> None:
        async with served(tmp_path, groups=2) as (engine, _, _):
            frontend = Frontend(FrontendConfig(model_folder("tiny"), tmp_path / "core.sock"))
            await frontend.start()
            async with make_channel(f"127.0.0.1:{frontend.port}") as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                calls = [stub.Generate(pb.GenerateRequest(text="The")) for _ in range(2)]
                await until_queued(stub, 2)
                workers = (await stub.GetStats(pb.GetStatsRequest())).load.workers
                asked = {link.endpoint for link in engine.workers.links.values()}
                assert {worker.endpoint for worker in workers} == asked
                assert all(worker.problem and not worker.connected for worker in workers)
                for call in calls:
                    call.cancel()
                await until_queued(stub, 0)
            await frontend.stop()

    async def until_queued(stub: Any, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await stub.GetStats(pb.GetStatsRequest(), wait_for_ready=True)).load.queued != count:
                await asyncio.sleep(0.02)

    asyncio.run(scenario())


def test_requests_before_the_first_worker_are_bounded_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, max_queue=2) as (engine, peer, _):
            for handle in (1, 2, 3):
                peer.submit(handle, bytes(8))
            ended = await asyncio.wait_for(peer.end(), PATIENCE_S)
            assert (ended.handle, ended.failure.code) == (3, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
            assert engine.held == 4, "two requests, each in two maps"

    asyncio.run(scenario())


def test_tokens_before_the_first_worker_are_bounded_too(tmp_path: Path) -> None:
    """As are those of the queue: who finds nobody waiting may have any number, who comes again too."""

    async def scenario() -> None:
        async with served(tmp_path, max_queue_tokens=4) as (engine, peer, _):
            peer.submit(1, bytes(5 * 4))
            peer.submit(2, bytes(4))
            refused = await asyncio.wait_for(peer.end(), PATIENCE_S)
            assert (refused.handle, refused.failure.code) == (2, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
            peer.submit(3, bytes(4), again=True)
            peer.abort("request-1")
            assert (await asyncio.wait_for(peer.end(), PATIENCE_S)).handle == 1
            peer.submit(4, bytes(3 * 4))
            peer.submit(5, bytes(4))
            assert (await asyncio.wait_for(peer.end(), PATIENCE_S)).handle == 5
            assert engine.held == 4, "two requests, each in two maps"

    asyncio.run(scenario())


EIGHT_TOKENS = WorkerDescription("", "m", "float32", 16, 8, 64, 8, (7,), 1, 4, 64, "1", "torch")


class Wire:
    """Stands for a connected worker: keeps the plans, and answers when it is told."""

    def __init__(self, engine: Engine, group: int = 0, description: WorkerDescription = EIGHT_TOKENS) -> None:
        self.plans: list[StepPlan] = []
        self._expected = 1
        self._engine = engine
        self._group = group
        self._link = engine.workers.links[group]
        self._link.send = self._send  # type: ignore[method-assign]
        engine.events.described(group, description)
        self._send(engine.events.opened(group, description))
        self._link.is_connected = True
        self.answer()
        engine.events.connected(group)

    def lose(self) -> None:
        """Its stream ends."""
        self._link.is_connected = False
        self._engine.events.lost(self._group)

    def _send(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self._link.outstanding.append((plan.step_id, 0.0, True))

    def answer(self) -> None:
        """The oldest plan's result."""
        step_id, _, _ = self._link.outstanding.popleft()
        (plan,) = [plan for plan in self.plans if plan.step_id == step_id]
        tokens = np.ones(len(plan.rows), dtype=np.int32)
        self._engine.events.result(self._group, StepResult(plan.epoch, step_id, tokens))

    async def planned(self, rows: int) -> None:
        """Waits for the next plan, which must have so many rows."""
        self._expected += 1
        async with asyncio.timeout(PATIENCE_S):
            while len(self.plans) < self._expected:
                await asyncio.sleep(0.001)
        assert [len(plan.rows) for plan in self.plans[self._expected - 1 :]] == [rows]


def test_masks_that_came_before_the_first_worker_are_of_use(tmp_path: Path) -> None:
    """And a mask that does not come holds up nobody but its own sequence."""

    async def scenario() -> None:
        async with served(tmp_path) as (engine, peer, _):
            for handle in (1, 2):
                peer.submit(handle, bytes(8), constrained=True)
                peer.mask(handle, 0)
            while engine.held < 6:
                await asyncio.sleep(0.01)
            wire = Wire(engine)
            await wire.planned(2)
            wire.answer()
            peer.mask(1, 1)
            await wire.planned(1)
            wire.answer()
            peer.mask(1, 2)
            peer.mask(2, 1)
            await wire.planned(2)
            for request in ("request-1", "request-2"):
                peer.abort(request)
                await peer.end()
            assert engine.held == 0

    asyncio.run(scenario())


def described(**changes: Any) -> WorkerDescription:
    return replace(EIGHT_TOKENS, **changes)


def test_requests_that_fit_only_a_worker_that_is_away_end_in_time(tmp_path: Path) -> None:
    """While another one serves, whose pool is the bound from then on."""

    async def scenario() -> None:
        async with served(tmp_path, groups=2, worker_loss_timeout=1.0) as (engine, peer, _):
            small, large = Wire(engine, 0, described(num_blocks=2)), Wire(engine, 1, EIGHT_TOKENS)
            peer.submit(1, bytes(4 * 40), max_tokens=1)
            await large.planned(1)
            large.lose()
            ended = await asyncio.wait_for(peer.end(), PATIENCE_S)
            assert (ended.handle, ended.failure.code) == (1, grpc.StatusCode.UNAVAILABLE.value[0])
            peer.submit(2, bytes(4 * 40), max_tokens=1)
            ended = await asyncio.wait_for(peer.end(), PATIENCE_S)
            assert (ended.handle, ended.failure.code) == (2, grpc.StatusCode.INVALID_ARGUMENT.value[0])
            peer.submit(3, bytes(4 * 20), max_tokens=1)
            await small.planned(1)
            assert engine.held == 2

    asyncio.run(scenario())


def test_the_first_worker_after_a_restart_bounds_nobody(tmp_path: Path) -> None:
    """The requests of the core before may need the pool of one that comes a moment later."""

    async def scenario() -> None:
        async with served(tmp_path, groups=2) as (engine, peer, _):
            peer.submit(1, bytes(4 * 40), max_tokens=1, again=True)
            while not engine.held:
                await asyncio.sleep(0.01)
            Wire(engine, 0, described(num_blocks=2))
            await asyncio.sleep(0)
            large = Wire(engine, 1, EIGHT_TOKENS)
            await large.planned(1)

    asyncio.run(scenario())


def test_a_worker_that_never_comes_holds_nobody_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, groups=2) as (engine, peer, _):
            peer.submit(1, bytes(4 * 20), max_tokens=1)
            await Wire(engine, 0, EIGHT_TOKENS).planned(1)

    asyncio.run(scenario())


class IdleWorker(Worker):
    """Says who it is."""

    async def Describe(self, request, context):
        return description_to_pb(described(worker=5))


def test_one_worker_under_two_names_is_one_group(tmp_path: Path) -> None:
    """Else each would take it from the other."""

    async def scenario() -> None:
        server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(IdleWorker({}, 10**6), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        names = (f"127.0.0.1:{port}", f"localhost:{port}")
        async with served(tmp_path, workers=names) as (engine, _, _), asyncio.timeout(PATIENCE_S):
            links = engine.workers.links.values()
            while [link.is_connected for link in links].count(True) != 1 or not any(link.is_refused for link in links):
                await asyncio.sleep(0.01)
            (group,) = [group for group in engine.state().groups if group.refused]
            (other,) = {*names} - {group.endpoint}
            assert group.problem == f"is the same worker as {other}: name it once in --workers"
        await server.stop(0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"block_size": 32}, "block_size 32.*--block-size 16"),
        ({"dtype": "bfloat16"}, "dtype bfloat16.*--dtype float32"),
        ({"max_num_seqs": 1}, "max_num_seqs 1.*--max-num-seqs 4 or more, or the scheduler with --max-num-seqs 1"),
    ],
)
def test_a_core_that_no_worker_fits_any_more_makes_way_for_another(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, groups=2) as (engine, _, running):
            only = Wire(engine, 0, EIGHT_TOKENS)
            with pytest.raises(Misfit, match=problem):
                engine.events.described(1, described(**changes))
            assert not running.done(), "the first one serves"
            only.lose()
            with pytest.raises(Misfit):
                engine.events.described(1, described(**changes))
            with pytest.raises(Outgrown, match=problem):
                await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(scenario())


@pytest.mark.parametrize(("groups", "error"), [(1, StartupError), (2, Misfit)])
def test_only_the_one_worker_that_there_is_ends_a_scheduler_of_another_model(
    tmp_path: Path, groups: int, error: type[Exception]
) -> None:
    async def scenario() -> None:
        async with served(tmp_path, groups=groups) as (engine, _, _):
            with pytest.raises(error, match="fingerprint another"):
                engine.events.described(0, described(fingerprint="another"))

    asyncio.run(scenario())


def test_a_malformed_submit_fails_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as (engine, peer, _):
            peer.submit(1, bytes(8))
            peer.submit(2, b"odd")
            ended = await asyncio.wait_for(peer.end(), PATIENCE_S)
            assert (ended.handle, ended.failure.code) == (2, grpc.StatusCode.INTERNAL.value[0])
            peer.abort("request-1")
            assert (await asyncio.wait_for(peer.end(), PATIENCE_S)).handle == 1, "the connection goes on"
            assert engine.held == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("verb", ["abort_by_id", "plan"])
def test_a_bug_ends_the_process_instead_of_leaving_it_deaf(tmp_path: Path, verb: str) -> None:
    async def scenario() -> None:
        async with served(tmp_path) as (engine, peer, running):
            setattr(engine.events.planning if verb == "plan" else engine, verb, lambda *_: 1 // 0)
            if verb == "plan":
                engine.events.connected(0)
            else:
                peer.abort("nobody")
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(running, PATIENCE_S)

    asyncio.run(scenario())


def test_who_waits_too_long_for_a_turn_is_told_and_never_planned(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with served(tmp_path, max_queue_time=0.3, max_num_seqs=1, depth=1) as (engine, peer, _):
            wire = Wire(engine)
            peer.submit(1, bytes(8), max_tokens=50)
            await wire.planned(rows=1)
            peer.submit(2, bytes(8), max_tokens=50)
            ended = await asyncio.wait_for(peer.end(), 5)
            assert (ended.handle, ended.failure.code) == (2, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
            assert "no turn within 0.3 s" in ended.failure.message and ended.failure.retry_after_ms > 0
            assert engine.load().counters.admissions == 1 and engine.held == 2, "the other one runs on"

    asyncio.run(scenario())


def test_a_turn_is_waited_for_before_the_first_worker_too_but_not_twice(tmp_path: Path) -> None:
    """Who goes on with an output had its turn, with a core that is gone."""

    async def scenario() -> None:
        async with served(tmp_path, max_queue_time=0.3) as (engine, peer, _):
            peer.submit(1, bytes(8), output=bytes(4), again=True)
            peer.submit(2, bytes(8))
            ended = await asyncio.wait_for(peer.end(), 5)
            assert ended.handle == 2
            assert await engine_holds(engine, 2)

    asyncio.run(scenario())


async def engine_holds(engine: Engine, entries: int) -> bool:
    """For a while."""
    await asyncio.sleep(0.6)
    return engine.held == entries
