"""Another process answers with bytes that are no message: each side says so, and whose they are, and lives on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.election import Election
from scheduler_svc.peers import Peers
from scheduler_svc.worker_client import WorkerLink
from scheduler_svc.worker_probe import WorkerProbe
from shared.dialer import Dialer
from shared.errors import ProtocolError, RequestFailed
from shared.pb import worker_pb2
from shared.security import PLAIN
from tandem import AsyncClient, Client
from tandem.drain import drain
from tests.patience import PATIENCE_S
from tests.service.test_worker_client import Listener

NO_MESSAGE = b"\xff"
TOLD = "sends what can't be decoded"
Logs = list[Any]


class Garbling(grpc.GenericRpcHandler):
    """Takes every call, and answers with what is no message unless the method has an answer here."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.calls = 0

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._answer(details.method.rpartition("/")[2], requests)
        )

    def _answer(self, method: str, requests: Iterator[bytes]) -> Iterator[bytes]:
        next(requests)
        self.calls += 1
        yield self.answers.get(method, NO_MESSAGE)


@pytest.fixture
def garbling() -> Iterator[tuple[Garbling, str]]:
    """The server and its address."""
    handler = Garbling()
    server = grpc.server(ThreadPoolExecutor(8), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield handler, f"127.0.0.1:{port}"
    server.stop(0)


@asynccontextmanager
async def running(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """It must not end by itself."""
    task = asyncio.create_task(work)
    yield
    assert not task.done(), task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("answers", [{}, {"Describe": worker_pb2.DescribeResponse().SerializeToString()}])
def test_a_worker_is_dialled_again_and_told_once(garbling: tuple[Garbling, str], answers: dict[str, bytes]) -> None:
    """In answer to Describe, and as a result."""
    handler, endpoint = garbling
    handler.answers = answers

    async def scenario() -> None:
        link = WorkerLink(0, endpoint, Listener(), Dialer(PLAIN), instance=1, step_timeout=PATIENCE_S)
        async with running(link.run()):
            await until(lambda: handler.calls > 2)
        assert link.is_refused is not bool(answers)

    with structlog.testing.capture_logs() as logs:
        asyncio.run(scenario())
    (entry,) = logs
    assert entry["endpoint"] == endpoint and TOLD in entry["reason"] and "version" in entry["reason"]


def test_a_standby_takes_such_a_worker_for_none_and_such_a_peer_for_gone(garbling: tuple[Garbling, str]) -> None:
    handler, endpoint = garbling
    config = SchedulerConfig(Path(), (endpoint,), peers=(endpoint,))

    async def scenario(logs: Logs) -> None:
        probe = WorkerProbe(config, lambda worker: True)
        probe.want(True)
        peers = Peers(config, Election(1, 2.0, 0.0, alone=False), lambda: None)
        async with running(probe.run()), running(peers.run()):
            await until(lambda: handler.calls > 2 and logs)
        assert not probe.reaches

    with structlog.testing.capture_logs() as logs:
        asyncio.run(scenario(logs))
    (entry,) = logs
    assert entry["endpoint"] == endpoint and TOLD in entry["reason"]


def test_a_worker_that_answers_so_is_not_drained(garbling: tuple[Garbling, str]) -> None:
    _, endpoint = garbling
    with pytest.raises(ProtocolError, match=f"{endpoint}: it {TOLD}"):
        drain(endpoint, PATIENCE_S)


def test_both_clients_say_the_same(garbling: tuple[Garbling, str]) -> None:
    _, endpoint = garbling
    calls: dict[str, tuple[Any, ...]] = {
        "complete": ("The",),
        "tokenize": ("The",),
        "detokenize": ([1],),
        "model_info": (),
        "load": (),
        "stats": (),
        "abort": ("id",),
    }

    async def scenario(method: str, arguments: tuple[Any, ...]) -> None:
        async with AsyncClient(endpoint) as client:
            await getattr(client, method)(*arguments)

    with Client(endpoint) as client:
        for method, arguments in calls.items():
            with pytest.raises(RequestFailed, match=f"the server {TOLD}"):
                getattr(client, method)(*arguments)
            with pytest.raises(RequestFailed, match=f"the server {TOLD}"):
                asyncio.run(scenario(method, arguments))
