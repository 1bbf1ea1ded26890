"""A process may die, a request does not: whatever is killed, or told to stop, every stream goes on."""

import asyncio
import contextlib
import signal
import time
from pathlib import Path

import psutil
import pytest
from grpc import aio

from tests.service.losses import ARGUMENTS, disturbed, kill, requests, send, survives
from tests.service.tandem_process import Output, Tandem, follow, generate_all, running, until_idle


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("loss")
    with running(folder / "log", *ARGUMENTS, "--frontends", "2", "--max-num-seqs", "32") as service:
        yield service


def test_thirty_two_streams_and_three_dead_workers(service: Tandem) -> None:
    survives(service, requests(32), *[kill(service, "launcher")] * 3)


@pytest.mark.parametrize("role", ["rank", "core"])
def test_one_killed_process(service: Tandem, role: str) -> None:
    survives(service, requests(6), kill(service, role))


def test_a_worker_told_to_stop_is_drained(service: Tandem) -> None:
    survives(service, requests(6), send(service.processes("launcher")[0], signal.SIGTERM))


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_frontend_ends_its_own_streams_alone(service: Tandem, fate: signal.Signals) -> None:
    """One connection is one frontend: those of the other one go on, and what the dead one held is free again."""

    async def scenario() -> tuple[set[str], Output]:
        ends: set[str] = set()
        async with contextlib.AsyncExitStack() as stack:
            victims = service.processes("frontend")
            channels = [
                await stack.enter_async_context(aio.insecure_channel(service.endpoint, [("grpc.channel_id", number)]))
                for number in range(16)
            ]
            outputs = [Output() for _ in channels]
            (wanted,) = requests(1, max_tokens=300)
            streams = [
                asyncio.create_task(follow(channel, wanted, output))
                for channel, output in zip(channels, outputs, strict=True)
            ]
            while not all(output.token_ids for output in outputs):
                await asyncio.sleep(0.01)
            victims[0].send_signal(fate)
            for result in await asyncio.gather(*streams, return_exceptions=True):
                ends.add(result.code().name if isinstance(result, aio.AioRpcError) else "OK")
            return ends, max(outputs, key=lambda output: len(output.token_ids))

    ends, longest = asyncio.run(scenario())
    assert ends == {"OK", "UNAVAILABLE"}, "16 connections spread over both frontends"
    assert len(longest.token_ids) == 300
    asyncio.run(until_idle(service.endpoint))
    while len(service.processes("frontend")) < 2:
        time.sleep(0.05)


def test_two_groups_of_two_ranks_lose_a_rank_each(service: Tandem, tmp_path: Path) -> None:
    """Sequences of a lost group go on in the other one; one rank and two give the same tokens."""
    wanted = requests(8)
    expected = asyncio.run(generate_all(service.endpoint, wanted))
    with running(tmp_path / "log", *ARGUMENTS, "--workers", "2", "--tensor-parallel", "2") as groups:
        outputs = asyncio.run(disturbed(groups, wanted, kill(groups, "rank", 3), kill(groups, "rank", 0)))
        asyncio.run(until_idle(groups.endpoint))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_ctrl_c_lets_running_streams_finish(tmp_path: Path) -> None:
    with running(tmp_path / "log", "--dtype", "float64", "--kv-cache-memory", "64") as service:
        outputs = asyncio.run(disturbed(service, requests(4), send(psutil.Process(service.process.pid), signal.SIGINT)))
        assert [len(output.token_ids) for output in outputs] == [120] * 4
