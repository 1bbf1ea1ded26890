"""A process may stand still, a request does not: what is stopped or blocked is noticed, and every stream goes on."""

import asyncio
import contextlib
import os
import signal
import time

import psutil
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.rpc import until_serving
from tests.patience import PATIENCE_S
from tests.service.losses import ARGUMENTS, STEP_TIMEOUT_S, requests, send, survives
from tests.service.tandem_process import Tandem, running

BLOCK = signal.SIGUSR2
"""Blocks the event loop of the process that gets it: Python runs a signal's handler in the main thread."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("stopped")
    hook = f"import signal, time\nsignal.signal({BLOCK.value}, lambda *_: time.sleep(1000))\n"
    (folder / "sitecustomize.py").write_text(hook)
    path = os.pathsep.join([str(folder), os.getcwd()])
    with running(folder / "log", *ARGUMENTS, "--frontends", "2", PYTHONPATH=path) as service:
        yield service


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
