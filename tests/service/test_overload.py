"""More than the service can take: who waits, whose turn it is, who is refused; and a lost worker changes nothing of it.

The worker stands still while requests come, so that they wait however fast it is.
"""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from tandem import AsyncClient
from tests.patience import PATIENCE_S
from tests.service.standing_still import StandingStill
from tests.service.tandem_process import Output, Tandem, generate_all, load, running, until_idle

PLACES = 6
"""In the queue, beside the one that runs."""
QUEUE_TIME_S = 60.0


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> StandingStill:
    return StandingStill(tmp_path_factory.mktemp("still"))


@pytest.fixture(scope="module")
def service(still: StandingStill, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    arguments = ["--dtype", "float64", "--kv-cache-memory", "64", "--max-num-seqs", "1", "--fair-by", "x-tenant"]
    arguments += ["--max-queue", str(PLACES), "--max-queue-time", str(QUEUE_TIME_S), *still.arguments]
    with running(tmp_path_factory.mktemp("overload") / "log", *arguments, **still.env) as service:
        yield service


def request(number: int, max_tokens: int = 40) -> pb.GenerateRequest:
    made = pb.GenerateRequest(text="It is a truth" + " and" * number)
    made.sampling.seed = number
    made.stopping.max_tokens = max_tokens
    made.stopping.ignore_eos = True
    return made


async def follow(channel: aio.Channel, wanted: pb.GenerateRequest, tenant: str) -> Output:
    output = Output()
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    async for response in stub.Generate(wanted, metadata=(("x-tenant", tenant),)):
        output.add(response)
    return output


async def until_live(service: Tandem, requests: int) -> None:
    """Until so many run or wait."""
    async with asyncio.timeout(PATIENCE_S):
        while (now := await load(service.endpoint)).queued + now.running != requests:
            await asyncio.sleep(0.05)


async def latest(service: Tandem, count: int) -> list[str]:
    """Ids of requests in the order in which they ended at the server: a client that comes late sees several at once."""
    async with aio.insecure_channel(service.endpoint) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stats = await stub.GetStats(pb.GetStatsRequest(max_requests=count))
    return [one.request_id for one in reversed(stats.latest)]


def test_one_tenant_s_flood_does_not_delay_another_and_a_lost_worker_changes_nothing(
    service: Tandem, still: StandingStill
) -> None:
    wanted = [request(number) for number in range(5)]
    expected = asyncio.run(generate_all(service.endpoint, wanted))

    async def scenario() -> list[Output]:
        (rank,) = service.processes("rank")
        async with aio.insecure_channel(service.endpoint) as channel:
            with still.now():
                streams = []
                for number, tenant in enumerate(["flood"] * 4 + ["other"], 1):
                    wanted[number - 1].request_id = f"{tenant} {number}"
                    streams.append(asyncio.create_task(follow(channel, wanted[number - 1], tenant)))
                    await until_live(service, number)
                rank.kill()
            return await asyncio.gather(*streams)

    outputs = asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    assert [(output.token_ids, output.text) for output in outputs] == [(o.token_ids, o.text) for o in expected]
    ended = asyncio.run(latest(service, len(wanted)))
    assert ended[2] == "other 5", "after the one that ran and the one that waited first"
    asyncio.run(until_idle(service.endpoint))


def test_who_is_refused_is_told_when_to_come_again_and_the_client_library_does(
    service: Tandem, still: StandingStill
) -> None:
    async def scenario() -> None:
        async with aio.insecure_channel(service.endpoint) as channel, AsyncClient(service.endpoint) as client:
            with still.now():
                streams = [asyncio.create_task(follow(channel, request(0, 5), "a"))]
                await until_live(service, 1)
                streams += [asyncio.create_task(follow(channel, request(0, 5), "a")) for _ in range(PLACES)]
                await until_live(service, 1 + PLACES)
                with pytest.raises(aio.AioRpcError) as refused:
                    await follow(channel, request(1), "b")
                assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                trailers = dict(refused.value.trailing_metadata() or ())
                status, hint = status_pb2.Status(), error_details_pb2.RetryInfo()
                status.ParseFromString(trailers["grpc-status-details-bin"])
                assert status.details[0].Unpack(hint) and 100 <= hint.retry_delay.ToMilliseconds() <= 60_000
                patient = asyncio.create_task(client.complete("It is", max_tokens=3, ignore_eos=True))
                await asyncio.sleep(0.2)
            assert len((await patient).samples[0].token_ids) == 3
            await asyncio.gather(*streams)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    asyncio.run(until_idle(service.endpoint))


def test_a_deadline_that_passes_in_the_queue_costs_no_step(service: Tandem, still: StandingStill) -> None:
    async def scenario() -> None:
        async with aio.insecure_channel(service.endpoint) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            with still.now():
                first = asyncio.create_task(follow(channel, request(0), "a"))
                await until_live(service, 1)
                late = request(1)
                late.request_id = "late"
                with pytest.raises(aio.AioRpcError) as error:
                    async for _ in stub.Generate(late, timeout=0.3):
                        pass
                assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                await until_live(service, 1)
            await first
            stats = await stub.GetStats(pb.GetStatsRequest(max_requests=10))
            (ended,) = [one for one in stats.latest if one.request_id == "late"]
            assert (ended.outcome, ended.completion_tokens) == ("deadline_exceeded", 0)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
    asyncio.run(until_idle(service.endpoint))
