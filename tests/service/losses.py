"""What happens to a service amid streams, and the check that each stream goes on as if nothing had.

The oracle is the undisturbed run, in float64, where a replay gives the same tokens.
"""

import asyncio
import random
import signal
from collections.abc import Callable

import psutil
from grpc import aio

from shared.pb import generation_pb2 as pb
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Output, Tandem, follow, generate_all, until_idle

STEP_TIMEOUT_S = 2.0
ARGUMENTS = ("--dtype", "float64", "--step-timeout", str(STEP_TIMEOUT_S), "--kv-cache-memory", "64")
"""Of services that lose something."""


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
