"""A frontend of a scheduler that has peers: what it tells them and its clients, from what its core says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode, aio

from shared.pb import core_pb2, peer_pb2, peer_pb2_grpc
from shared.pb import generation_pb2 as pb
from shared.rpc import ACTIVE_ENDPOINT
from shared.tokens import LEAST_LENGTH
from tests.frontend.fake_core import ready_state, until
from tests.frontend.harness import Served, collect, run, serving

LEADS = peer_pb2.PeerState(scheduler=7, leading=True, serving=True, candidate=True, term=3)
STANDS_BY = core_pb2.CoreState(standby=True, active_endpoint="other:1", peer=peer_pb2.PeerState(scheduler=7, term=3))


async def told(served: Served, state: core_pb2.CoreState) -> None:
    served.core.tell(state)
    await until(lambda: served.frontend.link.state == state)


async def model_info(served: Served) -> pb.GetModelInfoResponse:
    return await served.stub.GetModelInfo(pb.GetModelInfoRequest())


async def refused(call: Any) -> aio.AioRpcError:
    with pytest.raises(aio.AioRpcError) as refusal:
        await call
    return refusal.value


def test_a_standby_says_at_once_who_serves(model: Path) -> None:
    """Also where its core has never known a model, and to a call that waited for one."""

    async def scenario() -> None:
        async with serving(model) as served:
            served.frontend.link._model = core_pb2.ServedModel()
            await told(served, core_pb2.CoreState())
            waiting = asyncio.create_task(refused(served.stub.GetModelInfo(pb.GetModelInfoRequest())))
            await told(served, STANDS_BY)
            refusals = [await waiting, await refused(served.stub.GetLoad(pb.GetLoadRequest()))]
            refusals.append(await refused(collect(served.stub.Generate(pb.GenerateRequest(text="a")))))
            for refusal in refusals:
                assert refusal.code() is StatusCode.UNAVAILABLE
                assert dict(refusal.trailing_metadata() or ())[ACTIVE_ENDPOINT] == "other:1"
                assert "other:1" in (refusal.details() or "")
            finished = served.frontend.service.counts.finished
            assert (finished["standby"], finished["unavailable"]) == (1, 0), "no failure, of which alerts would tell"
            await told(served, core_pb2.CoreState())
            taking_over = asyncio.ensure_future(model_info(served))
            await told(served, ready_state())
            assert (await taking_over).vocabulary_size == 512

    run(scenario())


def test_a_standby_s_core_learns_that_nobody_waits_any_more(model: Path) -> None:
    """Its count is what autoscalers see, and it has no other way to know that those before it were refused."""

    async def scenario() -> None:
        async with serving(model) as served:
            served.frontend.link._model = core_pb2.ServedModel()
            await told(served, core_pb2.CoreState())
            waiting = asyncio.create_task(refused(collect(served.stub.Generate(pb.GenerateRequest(text="a")))))
            await until(lambda: served.frontend.service.live == 1)
            served.core.tell(core_pb2.CoreState())
            await until(lambda: served.core.waiting[-1:] == [1])
            await told(served, STANDS_BY)
            assert (await waiting).code() is StatusCode.UNAVAILABLE
            served.core.tell(STANDS_BY)
            await until(lambda: served.core.waiting[-1:] == [0])

    run(scenario())


def test_peers_hear_the_core_s_words_and_its_silence(model: Path, tmp_path: Path) -> None:
    """Without a token, which clients need."""

    async def scenario() -> None:
        tokens = tmp_path / "tokens"
        tokens.write_text("x" * LEAST_LENGTH)
        async with serving(model, token_file=tokens) as served:
            call = peer_pb2_grpc.PeerServiceStub(served.channel).Watch(peer_pb2.WatchPeerRequest())
            await told(served, ready_state(peer=LEADS))
            while await call.read() != LEADS:
                pass
            served.core.tell(ready_state(peer=LEADS))
            assert await call.read() == LEADS, "each word is passed on, also one that says nothing new"
            served.core.die()
            reading = asyncio.ensure_future(call.read())
            await until(lambda: served.frontend.link.state is None)
            await asyncio.sleep(0.05)
            assert not reading.done()
            served.core.state = STANDS_BY
            await served.core.start()
            assert await reading == STANDS_BY.peer
            call.cancel()

    run(scenario())


@pytest.mark.parametrize("hands_off", [False, True])
def test_a_leader_that_is_to_stop_keeps_or_hands_over_the_lead(model: Path, hands_off: bool) -> None:
    async def scenario() -> None:
        async with serving(model, hands_off=hands_off, drain_timeout=0.3) as served:
            await told(served, ready_state(peer=LEADS))
            call = served.stub.Generate(pb.GenerateRequest(text="a"))
            await served.core.submitted()
            peer = peer_pb2_grpc.PeerServiceStub(served.channel).Watch(peer_pb2.WatchPeerRequest())
            assert await peer.read() == LEADS
            stopping = asyncio.create_task(served.frontend.stop())
            lead = not hands_off
            left = peer_pb2.PeerState(scheduler=7, leading=lead, serving=lead, candidate=False, term=3)
            assert await peer.read() == left
            assert (await refused(collect(call))).code() is StatusCode.UNAVAILABLE
            await stopping

    run(scenario())


def test_a_core_that_takes_another_s_place_learns_that_it_led(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            await told(served, ready_state(peer=LEADS))
            for state, terms in ((LEADS, [3]), (STANDS_BY.peer, [3, 3]), (LEADS, [3, 3])):
                served.core.die()
                await until(lambda: served.frontend.link.state is None)
                served.core.state = ready_state(peer=state)
                await served.core.start()
                await until(lambda state=state: served.frontend.link.state == ready_state(peer=state))
                await until(lambda terms=terms: served.core.led_before == terms)

    run(scenario())
