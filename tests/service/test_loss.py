"""A process may die, a request does not: whatever is killed or stopped, every stream goes on.

The oracle is the undisturbed run, in float64, where a replay gives the same tokens.
"""

import asyncio
import random
import signal
from collections.abc import Callable

import psutil
import pytest
from grpc import aio

from shared.pb import generation_pb2 as pb
from tests.service.tandem_process import Output, Tandem, follow, generate_all, running, until_idle

STEP_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("loss") / "log"
    arguments = ["--dtype", "float64", "--frontends", "2", "--step-timeout", str(STEP_TIMEOUT_S)]
    with running(log, *arguments, "--max-num-seqs", "32", "--kv-cache-memory", "64") as service:
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


def same(one, other) -> None:
    assert [output.token_ids for output in one] == [output.token_ids for output in other]
    assert [output.text for output in one] == [output.text for output in other]
    assert [output.finish for output in one] == [output.finish for output in other]


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
        await asyncio.wait_for(streams, 120)
    return outputs


def kill(service: Tandem, role: str):
    def fault() -> None:
        service.processes(role)[0].kill()

    return fault


def test_thirty_two_streams_and_three_dead_workers(service: Tandem) -> None:
    wanted = requests(32)
    undisturbed = asyncio.run(generate_all(service.endpoint, wanted))
    outputs = asyncio.run(disturbed(service, wanted, *[kill(service, "launcher")] * 3))
    same(outputs, undisturbed)
    assert all(len(output.token_ids) == 120 for output in outputs)
    asyncio.run(until_idle(service.endpoint))


@pytest.mark.parametrize("role", ["rank", "core"])
def test_one_killed_process(service: Tandem, role: str) -> None:
    wanted = requests(6)
    undisturbed = asyncio.run(generate_all(service.endpoint, wanted))
    same(asyncio.run(disturbed(service, wanted, kill(service, role))), undisturbed)
    asyncio.run(until_idle(service.endpoint))


@pytest.mark.parametrize("role", ["rank", "launcher"])
def test_a_stopped_worker_is_noticed(service: Tandem, role: str) -> None:
    """It still holds its connections: only the missing results tell."""
    wanted = requests(6)
    undisturbed = asyncio.run(generate_all(service.endpoint, wanted))
    stopped: list[psutil.Process] = service.processes(role)

    def fault() -> None:
        stopped[0].send_signal(signal.SIGSTOP)

    try:
        same(asyncio.run(disturbed(service, wanted, fault)), undisturbed)
    finally:
        if stopped[0].is_running():
            stopped[0].send_signal(signal.SIGCONT)
    asyncio.run(until_idle(service.endpoint))
