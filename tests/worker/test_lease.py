"""An open plan stream is a lease on the worker: who gets it, who takes it over, and how it ends."""

import asyncio

import pytest
from grpc import StatusCode

from tests.patience import PATIENCE_S
from tests.worker.worker_harness import Stream, Worker, run, until


def test_another_instance_is_refused_while_the_stream_is_open() -> None:
    async def test(worker: Worker) -> None:
        holder = Stream(worker, instance=7, epoch=3)
        await holder.send()
        await holder.read()
        other = Stream(worker, instance=8, epoch=9)
        await other.send()
        assert (await other.ended())[0] is StatusCode.FAILED_PRECONDITION
        await holder.send()
        assert (await holder.read()).step_id == 2
        await holder.call.done_writing()
        assert (await holder.ended())[0] is StatusCode.OK
        other = Stream(worker, instance=8, epoch=1)
        await other.send()
        assert (await other.read()).epoch == 1

    run(test)


@pytest.mark.parametrize("epoch", [2, 3])
def test_an_epoch_does_not_come_back(epoch: int) -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker, epoch=3)
        await stream.send()
        await stream.read()
        for _ in range(2):  # while it is open, and after it
            late = Stream(worker, epoch=epoch)
            await late.send()
            assert (await late.ended())[0] is StatusCode.FAILED_PRECONDITION
            stream.call.cancel()

    run(test)


def test_a_higher_epoch_takes_over_after_the_running_step_and_drops_what_was_queued() -> None:
    async def test(worker: Worker) -> None:
        worker.group.gate.clear()
        old = Stream(worker, epoch=1)
        for _ in range(3):
            await old.send()
        await until(lambda: (1, 1) in worker.group.commands)
        new = Stream(worker, epoch=2)
        await new.send()
        await asyncio.sleep(0.2)
        assert worker.group.commands == ["open", (1, 1)], "opened while a step was running"
        worker.group.gate.set()
        assert (await new.read()).epoch == 2
        assert (await old.ended())[0] is StatusCode.FAILED_PRECONDITION
        assert worker.group.commands == ["open", (1, 1), "open", (2, 1)]

    run(test)


def test_a_lost_scheduler_frees_the_lease_while_its_step_runs() -> None:
    async def test(worker: Worker) -> None:
        worker.group.gate.clear()
        lost = Stream(worker, instance=7)
        for _ in range(3):
            await lost.send()
        await until(lambda: (1, 1) in worker.group.commands)
        lost.call.cancel()
        await asyncio.wait_for(worker.server.released(), PATIENCE_S)
        other = Stream(worker, instance=8)
        await other.send()
        worker.group.gate.set()
        await other.read()
        assert worker.group.commands == ["open", (1, 1), "open", (1, 1)]

    run(test)


def test_silence_ends_the_lease_but_a_long_step_is_not_silence() -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker, instance=7)
        worker.group.gate.clear()
        await stream.send()
        await asyncio.sleep(1.5)
        worker.group.gate.set()
        assert (await stream.read()).step_id == 1
        code, details = await stream.ended()
        assert code is StatusCode.DEADLINE_EXCEEDED
        assert "no plan for 1 s" in details
        other = Stream(worker, instance=8)
        await other.send()
        await other.read()

    run(test, lease_timeout=1.0)


def test_heartbeats_are_answered_and_keep_the_lease() -> None:
    async def test(worker: Worker) -> None:
        stream = Stream(worker)
        for step_id in range(1, 8):
            await stream.send()
            assert (await stream.read()).step_id == step_id
            await asyncio.sleep(0.2)

    run(test, lease_timeout=1.0)
