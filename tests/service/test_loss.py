"""A process may die, a request does not: whatever is killed or stopped, every stream goes on.

The oracle is the undisturbed run, in float64, where a replay gives the same tokens.
"""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.pb import generation_pb2 as pb
from shared.rpc import until_serving
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Output, Tandem, follow, generate_all, running, until_idle

STEP_TIMEOUT_S = 2.0
BLOCK = signal.SIGUSR2
"""Blocks the event loop of the process that gets it: Python runs a signal's handler in the main thread."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("loss")
    hook = f"import signal, time\nsignal.signal({BLOCK.value}, lambda *_: time.sleep(1000))\n"
    (folder / "sitecustomize.py").write_text(hook)
    path = os.pathsep.join([str(folder), os.getcwd()])
    arguments = ["--dtype", "float64", "--frontends", "2", "--step-timeout", str(STEP_TIMEOUT_S)]
    with running(
        folder / "log", *arguments, "--max-num-seqs", "32", "--kv-cache-memory", "64", PYTHONPATH=path
    ) as service:
        yield service


def requests(count: int, max_tokens: int = 120) -> list[pb.GenerateRequest]:
    """Greedy and sampled ones, filtered and not, with shared and own prompts."""
    rng = random.Random(7)
    made = []
    for number in range(count):
        request = pb.GenerateRequest(text="It is a truth universally" + " and" * rng.randrange(40))
        request.sampling.seed = number
        request.sampling.temperature = rng.choice([0.0, 0.7, 1.0])
        request.sampling.top_k = rng.choice([0, 20])
        request.sampling.top_p = rng.choice([1.0, 0.9])
        request.stopping.max_tokens = max_tokens
        request.stopping.ignore_eos = True
        made.append(request)
    return made


async def disturbed(service: Tandem, wanted: list[pb.GenerateRequest], *faults: Callable[[], None]) -> list[Output]:
    """The outputs of `wanted` while each fault happens in turn, each after more tokens have arrived."""
    outputs = [Output() for _ in wanted]

    def received() -> int:
        return sum(len(output.token_ids) for output in outputs)

    async with aio.insecure_channel(service.endpoint) as channel:
        streams = asyncio.gather(*(follow(channel, *pair) for pair in zip(wanted, outputs, strict=True)))
        for fault in faults:
            enough = received() + 10 * len(wanted)
            while received() < enough:
                await asyncio.sleep(0.01)
            assert not streams.done(), "the run was too short to disturb"
            fault()
        await asyncio.wait_for(streams, PATIENCE_S)
    return outputs


def kill(service: Tandem, role: str, number: int = 0) -> Callable[[], None]:
    return lambda: service.processes(role)[number].kill()


def send(process: psutil.Process, number: signal.Signals) -> Callable[[], None]:
    return lambda: process.send_signal(number)


def survives(service: Tandem, wanted: list[pb.GenerateRequest], *faults: Callable[[], None]) -> None:
    """The disturbed run gives what the undisturbed one gave, and holds nothing afterwards."""
    undisturbed = asyncio.run(generate_all(service.endpoint, wanted))
    outputs = asyncio.run(disturbed(service, wanted, *faults))
    for output, expected in zip(outputs, undisturbed, strict=True):
        assert output.token_ids == expected.token_ids
        assert (output.text, output.finish) == (expected.text, expected.finish)
    asyncio.run(until_idle(service.endpoint))


def test_thirty_two_streams_and_three_dead_workers(service: Tandem) -> None:
    survives(service, requests(32), *[kill(service, "launcher")] * 3)


@pytest.mark.parametrize("role", ["rank", "core"])
def test_one_killed_process(service: Tandem, role: str) -> None:
    survives(service, requests(6), kill(service, role))


@pytest.mark.parametrize("role", ["rank", "launcher", "core"])
def test_a_stopped_process_is_noticed(service: Tandem, role: str) -> None:
    """It still holds its connections: only the missing messages tell. A stopped launcher stops nobody."""
    (stopped,) = service.processes(role)
    try:
        survives(service, requests(6), send(stopped, signal.SIGSTOP))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            stopped.send_signal(signal.SIGCONT)


def test_a_blocked_event_loop_is_noticed(service: Tandem) -> None:
    """It still answers pings of the transport."""
    survives(service, requests(6), send(service.processes("rank")[0], BLOCK))


def test_a_stop_of_the_whole_host_is_no_process_s_fault(service: Tandem) -> None:
    """As when a virtual machine is paused: all stand still for longer than the timeout, and none is replaced."""

    def pause() -> None:
        family = service.everyone()
        for process in family:
            process.suspend()
        time.sleep(2 * STEP_TIMEOUT_S)
        for process in family:
            process.resume()

    before = service.everyone()
    survives(service, requests(4, 400), pause)
    time.sleep(2 * STEP_TIMEOUT_S)
    assert service.everyone() == before


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


def test_clients_can_see_that_nobody_serves(service: Tandem) -> None:
    async def scenario() -> None:
        await until_serving(service.endpoint, "tandem.Active")
        (stopped,) = service.processes("rank")
        stopped.send_signal(signal.SIGSTOP)
        async with aio.insecure_channel(service.endpoint) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            async for answer in stub.Watch(health_pb2.HealthCheckRequest(service="tandem.Active"), timeout=PATIENCE_S):
                if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                    break
        await until_serving(service.endpoint, "tandem.Active")

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_two_groups_of_two_ranks_lose_a_rank_each(service: Tandem, tmp_path: Path) -> None:
    """Sequences of a lost group go on in the other one; one rank and two give the same tokens."""
    arguments = ["--dtype", "float64", "--step-timeout", str(STEP_TIMEOUT_S), "--kv-cache-memory", "64"]
    wanted = requests(8)
    expected = asyncio.run(generate_all(service.endpoint, wanted))
    with running(tmp_path / "log", *arguments, "--workers", "2", "--tensor-parallel", "2") as groups:
        outputs = asyncio.run(disturbed(groups, wanted, kill(groups, "rank", 3), kill(groups, "rank", 0)))
        asyncio.run(until_idle(groups.endpoint))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_ctrl_c_lets_running_streams_finish(tmp_path: Path) -> None:
    with running(tmp_path / "log", "--dtype", "float64", "--kv-cache-memory", "64") as service:
        outputs = asyncio.run(disturbed(service, requests(4), send(psutil.Process(service.process.pid), signal.SIGINT)))
        assert [len(output.token_ids) for output in outputs] == [120] * 4
