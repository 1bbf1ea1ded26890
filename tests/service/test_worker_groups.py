"""Who is dialled: addresses of a name that come, go, or can't be had for a while. Workers in this process."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.worker_groups import WorkerGroups
from shared.errors import StartupError
from shared.pb import worker_pb2_grpc
from shared.ports import find_free
from shared.resolve import resolve
from shared.types import StepPlan, StepResult, WorkerDescription
from tandem.models import model_folder
from tests.patience import PATIENCE_S
from tests.service.test_worker_client import Worker

A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"


class Name:
    """Stands for the resolver: the records of every name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *records: str) -> None:
        self.records = records
        self.asked = 0
        monkeypatch.setattr(socket, "getaddrinfo", self._getaddrinfo)

    def _getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        self.asked += 1
        if not self.records:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        families = {False: socket.AF_INET, True: socket.AF_INET6}
        return [(families[":" in record], socket.SOCK_STREAM, 6, "", (record, port)) for record in self.records]


class Listener:
    """Opens whatever is there, and remembers who is connected."""

    def __init__(self) -> None:
        self.connections: list[int] = []
        self.losses: list[int] = []
        self._plans: dict[int, list[int]] = {}

    def described(self, group: int, description: WorkerDescription) -> None:
        pass

    def opened(self, group: int, description: WorkerDescription) -> StepPlan:
        self._plans[group] = [len(self.losses) + len(self.connections) + 1, 0]
        return self.heartbeat(group)

    def connected(self, group: int) -> None:
        self.connections.append(group)

    def heartbeat(self, group: int) -> StepPlan:
        self._plans[group][1] += 1
        return StepPlan(*self._plans[group])

    def result(self, group: int, result: StepResult) -> None:
        pass

    def lost(self, group: int) -> None:
        self.losses.append(group)


class Pods:
    """Workers by address, all on one port."""

    def __init__(self) -> None:
        self.port = find_free("127.0.0.1")
        self._servers: dict[str, aio.Server] = {}

    async def start(self, *hosts: str) -> None:
        for host in hosts:
            server = self._servers[host] = aio.server()
            worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker({}, 10**6), server)
            server.add_insecure_port(f"{host}:{self.port}")
            await server.start()

    async def stop(self, *hosts: str) -> None:
        for host in hosts:
            await self._servers.pop(host).stop(0)

    async def stop_all(self) -> None:
        await self.stop(*list(self._servers))


@contextlib.asynccontextmanager
async def dialled(pods: Pods) -> AsyncIterator[tuple[WorkerGroups, Listener]]:
    target = f"dns:///workers:{pods.port}"
    config = SchedulerConfig(model=model_folder("tiny"), workers=(target,), resolve_interval=0.1)
    listener = Listener()
    groups = WorkerGroups(config, listener, instance=1)
    running = asyncio.create_task(groups.run())
    try:
        yield groups, listener
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await pods.stop_all()


async def until(groups: WorkerGroups, *connected: str, away: tuple[str, ...] = ()) -> None:
    """Waits until exactly these hosts are known, and connected or not."""
    wanted = {**dict.fromkeys(connected, True), **dict.fromkeys(away, False)}
    async with asyncio.timeout(PATIENCE_S):
        while {link.endpoint.split(":")[0]: link.is_connected for link in groups.links.values()} != wanted:
            await asyncio.sleep(0.01)


async def asked(name: Name) -> None:
    """The name has been resolved again, and what follows from it is done."""
    before = name.asked
    async with asyncio.timeout(PATIENCE_S):
        while name.asked < before + 2:
            await asyncio.sleep(0.01)


def test_groups_follow_the_names_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        name, pods = Name(monkeypatch, A, B), Pods()
        await pods.start(A, B, C)
        async with dialled(pods) as (groups, listener):
            await until(groups, A, B)
            name.records = (B, C)
            await until(groups, A, B, C)
            assert not listener.losses, "an address that is gone ends no stream"
            await pods.stop(A)
            await until(groups, B, C)
            assert len(listener.losses) == 1
            await pods.start(A)
            name.records = (A, B, C)
            await until(groups, A, B, C)
            assert len(set(listener.connections)) == 4, "a number is never used again"

    asyncio.run(scenario())


def test_an_address_that_comes_back_in_time_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        name, pods = Name(monkeypatch, A), Pods()
        await pods.start(A, B)
        async with dialled(pods) as (groups, listener):
            await until(groups, A)
            name.records = (B,)
            await until(groups, A, B)
            name.records = (A, B)
            await asked(name)
            await pods.stop(A)
            await until(groups, B, away=(A,))
            await pods.start(A)
            await until(groups, A, B)
            assert len(set(listener.connections)) == 2

    asyncio.run(scenario())


def test_a_name_that_can_not_be_resolved_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        name, pods = Name(monkeypatch), Pods()
        async with dialled(pods) as (groups, _):
            await asked(name)
            assert not groups.links and not groups.any_connected
            name.records = (A,)
            await pods.start(A)
            await until(groups, A)
            name.records = ()
            await pods.stop(A)
            await asked(name)
            await pods.start(A)
            await until(groups, A)

    asyncio.run(scenario())


def test_who_lets_go_may_dial_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a scheduler that stands by."""

    async def scenario() -> None:
        _, pods = Name(monkeypatch, A, B), Pods()
        await pods.start(A, B)
        async with dialled(pods) as (groups, listener):
            await until(groups, A, B)
        await pods.start(A, B)
        running = asyncio.create_task(groups.run())
        await until(groups, A, B)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not groups.any_connected and len(listener.losses) == 4
        await pods.stop_all()

    asyncio.run(scenario())


def test_a_pod_with_two_addresses_is_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    name = Name(monkeypatch, "::2", "10.0.0.2", "10.0.0.1", "10.0.0.1")
    assert asyncio.run(resolve("dns:///workers:5")) == ["10.0.0.1:5", "10.0.0.2:5"]
    name.records = ("::2",)
    assert asyncio.run(resolve("dns:///workers:5")) == ["[::2]:5"]


@pytest.mark.parametrize(
    "target", ["host", "host:", ":5", "host:x", "host:0", "host:65536", "dns://8.8.8.8/host:5", "dns:///:5"]
)
def test_what_is_no_address_is_refused(target: str) -> None:
    with pytest.raises(StartupError, match="host:port or dns:///name:port"):
        SchedulerConfig(model=model_folder("tiny"), workers=(target,))
