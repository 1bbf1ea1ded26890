"""Which of several endpoints the client asks: the one whose health service says that it is active."""

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from shared.errors import Standby, Unavailable
from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from shared.ports import find_free
from shared.rpc import make_server
from tandem import AsyncClient, Client
from tandem.connections import Connections
from tests.patience import PATIENCE_S

STATUS = {True: health_pb2.HealthCheckResponse.SERVING, False: health_pb2.HealthCheckResponse.NOT_SERVING}


HOSTS = ("127.0.0.1", "127.0.0.2")


def free_on_both() -> int:
    while True:
        port = find_free(HOSTS[0])
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOSTS[1], port))
            return port


class Scheduler(generation_pb2_grpc.GenerationServiceServicer):
    """Answers where it is active, and sends callers on where it stands by."""

    port = 0

    def __init__(self) -> None:
        self.endpoint = ""
        self.calls = 0
        self.is_active = False
        self.health = health.HealthServicer()
        self.server: aio.Server

    async def start(self, host: str) -> None:
        self.server = make_server(share_port=False)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, self.server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.endpoint = f"{host}:{Scheduler.port}"
        assert self.server.add_insecure_port(self.endpoint) == Scheduler.port
        await self.server.start()

    async def say(self, active: bool) -> None:
        self.is_active = active
        await self.health.set("tandem.Active", STATUS[active])

    async def Generate(self, request, context):
        yield pb.GenerateResponse(token_ids=[7], finish=pb.Finish(reason=pb.FINISH_REASON_LENGTH), usage=pb.Usage())

    async def Tokenize(self, request, context):
        self.calls += 1
        if not self.is_active:
            raise Standby("stands by", "")
        return pb.TokenizeResponse(token_ids=[1])


class Two:
    """In a thread with a loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.schedulers = [Scheduler(), Scheduler()]
        Scheduler.port = free_on_both()
        for scheduler, host in zip(self.schedulers, HOSTS, strict=True):
            self.run(scheduler.start(host))
        self.endpoints = [scheduler.endpoint for scheduler in self.schedulers]

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def activate(self, number: int) -> None:
        for index, scheduler in enumerate(self.schedulers):
            self.run(scheduler.say(index == number))

    def calls(self) -> list[int]:
        """Since the last time."""
        counted = [scheduler.calls for scheduler in self.schedulers]
        for scheduler in self.schedulers:
            scheduler.calls = 0
        return counted

    def close(self) -> None:
        for scheduler in self.schedulers:
            self.run(scheduler.server.stop(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


def ten_at(two: Two, number: int) -> list[int]:
    """Ten calls that all went to one."""
    return [10 * (number == index) for index in range(len(two.schedulers))]


def test_the_active_one_is_asked_and_no_other(two: Two) -> None:
    with Client(two.endpoints) as client:
        for number in (0, 1, 0):
            two.activate(number)
            deadline = time.monotonic() + PATIENCE_S
            while two.calls() != ten_at(two, number):
                assert time.monotonic() < deadline, "it never follows"
                assert [client.tokenize("a") for _ in range(10)] == [[1]] * 10


def test_the_same_for_asyncio(two: Two) -> None:
    async def scenario() -> None:
        async with AsyncClient(two.endpoints) as client:
            for number in (0, 1, 0):
                await asyncio.to_thread(two.activate, number)
                deadline = time.monotonic() + PATIENCE_S
                while two.calls() != ten_at(two, number):
                    assert time.monotonic() < deadline, "it never follows"
                    assert [await client.tokenize("a") for _ in range(10)] == [[1]] * 10

    asyncio.run(scenario())


def test_where_none_is_active_all_are_asked(two: Two) -> None:
    with Client(two.endpoints) as client:
        with pytest.raises(Unavailable, match="stands by"):
            client.tokenize("a")
        assert two.calls() == [1, 1]


def records(monkeypatch: pytest.MonkeyPatch, *hosts: str) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, Scheduler.port)) for host in hosts]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **options: found)


def test_a_name_stands_for_all_its_addresses_as_they_change(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC alone would stay with the first one that answers."""
    records(monkeypatch, *HOSTS)
    two.activate(1)
    with Client(name := f"dns:///schedulers.test:{Scheduler.port}") as client:
        assert client.tokenize("a") == [1]
    records(monkeypatch, HOSTS[1])
    with Client(name) as client:
        assert client.tokenize("a") == [1]
        records(monkeypatch, HOSTS[0])
        two.run(two.schedulers[1].server.stop(0))
        two.activate(0)
        deadline = time.monotonic() + PATIENCE_S
        with pytest.raises(Unavailable):
            client.tokenize("a")
        while two.calls() != [1, 0]:
            assert time.monotonic() < deadline, "it never follows"
            time.sleep(0.05)
            with contextlib.suppress(Unavailable):
                client.tokenize("a")


def test_a_new_request_finds_who_has_taken_the_place_behind_the_name(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client may still know the address of the one that is gone, and no other. It was served before, so that is no
    mistake of its user's."""
    records(monkeypatch, HOSTS[1])
    name = f"dns:///schedulers.test:{Scheduler.port}"
    with Client(name) as client, Client(name) as new:
        assert client.complete("a").samples[0].token_ids == (7,)
        two.run(two.schedulers[1].server.stop(0))
        with pytest.raises(Unavailable):
            new.complete("a")
        records(monkeypatch, HOSTS[0])
        assert client.complete("a").samples[0].token_ids == (7,)


def test_a_new_request_waits_until_one_of_several_endpoints_serves_again(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that was served knows that they are no mistake of its user's; one that never was is told at once."""
    with Client(two.endpoints) as client, Client(two.endpoints) as new, ThreadPoolExecutor() as pool:
        assert client.complete("a").samples[0].token_ids == (7,)
        for scheduler in two.schedulers:
            two.run(scheduler.server.stop(0))
        with pytest.raises(Unavailable):
            new.complete("a")
        tries, failed = itertools.count(1), Connections.failed
        refused = threading.Event()  # by both, and then once more

        def count(connections: Connections[Any], *how: Any) -> None:
            if next(tries) > len(two.schedulers):
                refused.set()
            failed(connections, *how)

        monkeypatch.setattr(Connections, "failed", count)
        late = pool.submit(client.complete, "a")
        late.add_done_callback(lambda _: refused.set())
        assert refused.wait(PATIENCE_S) and not late.done()
        two.run(two.schedulers[1].start(HOSTS[1]))
        assert late.result(PATIENCE_S).samples[0].token_ids == (7,)
