"""Ten blocks hold the prompts of five sequences, but their outputs only in turns: some give way and come back.

Each gives what it gives alone, in float64.
"""

import asyncio
from collections.abc import Iterator

import pytest
from grpc import aio

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from tests.service import test_constrain, test_generate, test_sampling
from tests.service.tandem_process import Output, Tandem, generate_all, running, until_idle


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    arguments = ["--num-kv-blocks", "10", "--block-size", "16", "--dtype", "float64"]
    with running(tmp_path_factory.mktemp("preemption") / "log", *arguments) as service:
        yield service


def run(service: Tandem, *requests: pb.GenerateRequest) -> list[Output]:
    return asyncio.run(generate_all(service.endpoint, requests))


def preemptions(service: Tandem) -> int:
    async def ask() -> pb.GetStatsResponse:
        async with aio.insecure_channel(service.endpoint) as channel:
            return await generation_pb2_grpc.GenerationServiceStub(channel).GetStats(pb.GetStatsRequest())

    return asyncio.run(ask()).preemptions


def together_and_alone(service: Tandem, wanted: list[pb.GenerateRequest]) -> tuple[list[Output], list[Output]]:
    alone = [run(service, one)[0] for one in wanted]
    before = preemptions(service)
    together = run(service, *wanted)
    assert preemptions(service) > before, "all had room"
    asyncio.run(until_idle(service.endpoint))
    return together, alone


def prompt(number: int) -> list[int]:
    return list(range(100 + number, 125 + number))


def test_sampled_tokens(service: Tandem) -> None:
    wanted = [test_generate.request(prompt(number), temperature=0.8, max_tokens=35) for number in range(5)]
    together, alone = together_and_alone(service, wanted)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_penalties_and_logprobs(service: Tandem) -> None:
    """Penalties count the output of before, logprobs are told once, also those of a prompt."""
    wanted = [test_sampling.request(prompt(number), temperature=0.8, max_tokens=35) for number in range(5)]
    for number, one in enumerate(wanted):
        one.sampling.repetition_penalty, one.sampling.frequency_penalty = 1.3, 0.5
        one.output.logprobs, one.output.prompt_logprobs = number, 1
    test_sampling.assert_same(*together_and_alone(service, wanted))


def test_constraints(service: Tandem) -> None:
    wanted = [one for one in test_constrain.long_ones() if one.HasField("constraint")][:5]
    together, alone = together_and_alone(service, wanted)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
