"""What a worker tells of itself, and how it stops."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from grpc import StatusCode, aio
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import make_channel
from shared.wire import description_from_pb
from tests.patience import PATIENCE_S
from tests.worker.worker_harness import (
    DESCRIPTION,
    ScriptedGroup,
    Stream,
    Worker,
    run,
    until_async,
)
from worker_svc.config import WorkerConfig
from worker_svc.progress import Progress
from worker_svc.serve import SERVICE, WorkerServer
from worker_svc.stats import no_stats


def test_draining() -> None:
    """Results say so, nobody else may open a stream, health tells; the open stream goes on until it is closed."""

    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        await stream.send()
        assert not (await stream.read()).draining
        drained = asyncio.create_task(worker.server.drain())
        await until_async(lambda: worker.health("readiness"), "NOT_SERVING")
        assert await worker.health(SERVICE) == "NOT_SERVING"
        assert await worker.health("liveness") == "SERVING"
        for _ in range(2):
            await stream.send()
            assert (await stream.read()).draining
        late = Stream(worker, epoch=2)
        await late.send()
        assert (await late.ended())[0] is StatusCode.UNAVAILABLE
        assert not drained.done()
        await stream.call.done_writing()
        await asyncio.wait_for(drained, PATIENCE_S)

    run(test)


def test_a_drained_worker_stays_and_is_held_by_nobody() -> None:
    """The call returns when the scheduler has let go; told to stop afterwards, the worker has nothing to wait for."""

    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        await stream.send()
        await stream.read()
        assert not (await worker.stub.Describe(worker_pb2.DescribeRequest())).draining
        call = asyncio.ensure_future(worker.stub.Drain(worker_pb2.DrainRequest()))
        await until_async(lambda: worker.health("readiness"), "NOT_SERVING")
        await stream.send()
        assert (await stream.read()).draining
        assert not call.done()
        await stream.call.done_writing()
        await asyncio.wait_for(call, PATIENCE_S)
        assert (await worker.stub.Describe(worker_pb2.DescribeRequest())).draining
        await worker.stub.Drain(worker_pb2.DrainRequest())
        await asyncio.wait_for(worker.server.drain(), PATIENCE_S)

    run(test)


def test_draining_ends_with_the_grace_period() -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        await stream.send()
        await stream.read()
        await asyncio.wait_for(worker.server.drain(), PATIENCE_S)

    run(test, drain_timeout=0.3, lease_timeout=2 * PATIENCE_S)


def test_calls_are_answered_during_a_step_and_a_stuck_one_is_told() -> None:
    async def test(worker: Worker) -> None:
        assert await worker.health("readiness") == "SERVING"
        worker.group.gate.clear()
        stream = Stream(worker)
        await stream.send()
        await until_async(lambda: worker.health("readiness"), "NOT_SERVING")
        assert await worker.health("liveness") == "SERVING"
        await worker.stub.Describe(worker_pb2.DescribeRequest(), timeout=PATIENCE_S)
        worker.group.gate.set()
        await stream.read()
        await until_async(lambda: worker.health("readiness"), "SERVING")

    run(test, step_timeout=0.3)


def test_nothing_is_served_before_the_group_is_warm() -> None:
    async def test() -> None:
        server = WorkerServer(WorkerConfig("unused", port=0), Progress(np.zeros((1, 3)), 0), no_stats())
        channel = make_channel(f"127.0.0.1:{await server.start()}")
        running = Worker(server, channel, ScriptedGroup(Progress(np.zeros((1, 3)), 0)))
        assert await running.health("readiness") == await running.health("") == "NOT_SERVING"
        assert await running.health("liveness") == "SERVING"
        describe = asyncio.ensure_future(running.stub.Describe(worker_pb2.DescribeRequest()))
        await asyncio.sleep(0.1)
        assert not describe.done()
        await server.answer(running.group, DESCRIPTION)
        assert description_from_pb(await describe) == DESCRIPTION
        assert await running.health(SERVICE) == "SERVING"
        await channel.close()
        await server.stop()

    asyncio.run(test())


def test_a_scheduler_without_the_token_is_told_its_flag(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("worker" * 4)

    async def test() -> None:
        config = WorkerConfig("unused", port=0, token_file=tmp_path / "tokens")
        server = WorkerServer(config, Progress(np.zeros((1, 3)), 0), no_stats())
        async with make_channel(f"127.0.0.1:{await server.start()}") as channel:
            with pytest.raises(aio.AioRpcError, match="a scheduler: --worker-token-file"):
                await worker_pb2_grpc.WorkerServiceStub(channel).Describe(worker_pb2.DescribeRequest())
        await server.stop()

    asyncio.run(test())


def test_reflection_tells_the_services() -> None:
    async def test(worker: Worker) -> None:
        stub = reflection_pb2_grpc.ServerReflectionStub(worker.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names

    run(test)


def test_no_tenant_may_call_a_worker(tmp_path: Path) -> None:
    """Plans of its own would read what other tenants' sequences left in the K/V pool."""
    (tmp_path / "tokens").write_text("operator-operator\nred red-red-red-red-red\n")

    def shown(token: str) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {token}"),)

    async def test(worker: Worker) -> None:
        red = shown("red-red-red-red-red")
        calls = (
            worker.stub.Describe(worker_pb2.DescribeRequest(), metadata=red),
            worker.stub.Drain(worker_pb2.DrainRequest(), metadata=red),
            worker.stub.Execute(metadata=red),
        )
        assert [await call.code() for call in calls] == [StatusCode.PERMISSION_DENIED] * 3
        question = worker_pb2.DescribeRequest()
        assert not (await worker.stub.Describe(question, metadata=shown("operator-operator"))).draining

    run(test, token_file=tmp_path / "tokens")
