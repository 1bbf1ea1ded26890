"""Two schedulers before one worker: whatever happens to the active one, the other goes on with its streams.

The oracle is the undisturbed run, in float64. Clients know both endpoints and nothing else.
"""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from shared.ports import find_free
from shared.rpc import ACTIVE_ENDPOINT
from tandem import Client
from tests.patience import PATIENCE_S
from tests.service.schedulers import Disturbance, Scheduler, all_at_once, expected, running_worker

SERVING = health_pb2.HealthCheckResponse.SERVING


class Pair:
    """Two schedulers, and who is active now."""

    def __init__(self, schedulers: list[Scheduler], worker: str) -> None:
        self.schedulers = schedulers
        self.worker = worker
        self.endpoints = [scheduler.endpoint for scheduler in schedulers]

    def serving(self, service: str) -> list[Scheduler]:
        """Those that say so of a health service, and answer within a second."""
        return [scheduler for scheduler in self.schedulers if _serves(scheduler.endpoint, service)]

    def until(self, *roles: str) -> None:
        """Waits until one is active and both are ready; or only the former, without "ready"."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.serving("tandem.Active")) != 1 or len(self.serving("readiness")) < len(roles):
            assert time.monotonic() < deadline, "they never agreed"
            time.sleep(0.05)

    @property
    def active(self) -> Scheduler:
        (active,) = self.serving("tandem.Active")
        return active

    @property
    def standby(self) -> Scheduler:
        active = self.active
        return next(scheduler for scheduler in self.schedulers if scheduler is not active)


def _serves(endpoint: str, service: str) -> bool:
    request, options = health_pb2.HealthCheckRequest(service=service), [("grpc.use_local_subchannel_pool", 1)]
    with contextlib.suppress(grpc.RpcError), grpc.insecure_channel(endpoint, options=options) as channel:
        return bool(health_pb2_grpc.HealthStub(channel).Check(request, timeout=1.0).status == SERVING)
    return False


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("standby")
    ports = [find_free("127.0.0.1"), find_free("127.0.0.1")]
    peers = ["--peers", ",".join(f"127.0.0.1:{port}" for port in ports), "--drain", "handoff"]
    with running_worker(folder / "worker") as worker:
        schedulers = [Scheduler(worker, folder / f"log-{port}", *peers, port=port) for port in ports]
        try:
            yield Pair(schedulers, worker)
        finally:
            for scheduler in schedulers:
                scheduler.kill()


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> list[object]:
    pair.until("both", "ready")
    return expected(pair.endpoints)


def outputs(samples: list[object]) -> list[object]:
    """All that must be the same at another scheduler. Its cache is another: cached_tokens is not compared."""
    return [[(text, ids, finish, *told) for text, ids, finish, _, *told in sample] for sample in samples]  # type: ignore[attr-defined]


def under_load(pair: Pair, undisturbed: list[object], strike: Callable[[], None]) -> None:
    """Streams run while the active one is struck, others begin meanwhile; all are those of the undisturbed run."""
    disturbance = Disturbance(strike, after=200)
    stop = threading.Event()
    late = threading.Thread(target=lambda: _asks_on(pair, stop, problems))
    problems: list[str] = []
    late.start()
    try:
        assert outputs(asyncio.run(all_at_once(pair.endpoints, disturbance.count))) == outputs(undisturbed)
    finally:
        stop.set()
        late.join()
    disturbance.done()
    assert not problems


def _asks_on(pair: Pair, stop: threading.Event, problems: list[str]) -> None:
    """Requests that begin at any time, one after another."""
    texts = set()
    with Client(pair.endpoints) as client:
        while not stop.is_set():
            try:
                texts.add(client.complete("It is", max_tokens=5, temperature=0.0).text)
            except Exception as error:
                problems.append(repr(error))
    if len(texts) != 1:
        problems.append(f"outputs differ: {texts}")


def test_the_standby_is_ready_and_says_who_serves(pair: Pair, undisturbed: list[object]) -> None:
    active, standby = pair.active, pair.standby
    with grpc.insecure_channel(standby.endpoint) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for call in (
            lambda: list(stub.Generate(pb.GenerateRequest(text="It is"))),
            lambda: stub.GetModelInfo(pb.GetModelInfoRequest()),
            lambda: stub.GetLoad(pb.GetLoadRequest()),
        ):
            with pytest.raises(grpc.RpcError) as refusal:
                call()
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(refusal.value.trailing_metadata())[ACTIVE_ENDPOINT] == active.endpoint
            assert active.endpoint in refusal.value.details()
        assert stub.Tokenize(pb.TokenizeRequest(text="It is")).token_ids


def test_the_active_one_is_killed(pair: Pair, undisturbed: list[object]) -> None:
    active = pair.active
    under_load(pair, undisturbed, active.kill)
    pair.until()
    assert pair.active is not active
    active.start()
    pair.until("both", "ready")
    assert pair.active is not active


def test_the_active_one_is_stopped_and_comes_back_as_the_standby(pair: Pair, undisturbed: list[object]) -> None:
    active = pair.active
    under_load(pair, undisturbed, lambda: active.send(signal.SIGSTOP))
    pair.until()
    successor = pair.active
    active.send(signal.SIGCONT)
    pair.until("both", "ready")
    assert pair.active is successor is not active


def test_the_core_of_the_active_one_is_stopped(pair: Pair, undisturbed: list[object]) -> None:
    """Its frontends answer pings all the while."""
    active = pair.active
    (core,) = [process for process in active.family() if "scheduler_svc.core_process" in " ".join(process.cmdline())]
    under_load(pair, undisturbed, lambda: core.send_signal(signal.SIGSTOP))
    pair.until("both", "ready")


def test_the_core_of_the_active_one_is_killed(pair: Pair, undisturbed: list[object]) -> None:
    active = pair.active
    (core,) = [process for process in active.family() if "scheduler_svc.core_process" in " ".join(process.cmdline())]
    under_load(pair, undisturbed, core.kill)
    pair.until("both", "ready")


def test_both_are_replaced_one_after_the_other(pair: Pair, undisturbed: list[object]) -> None:
    def update() -> None:
        for scheduler in (pair.standby, pair.active):
            assert scheduler.terminate() == 0
            scheduler.start()
            pair.until("both", "ready")

    under_load(pair, undisturbed, update)


def test_a_worker_that_restarts_stays_with_the_active_one(pair: Pair, undisturbed: list[object]) -> None:
    """Its streams are ended by a stranger's lease: what a worker that restarts looks like from outside, in no time."""
    active = pair.active
    pair.until("both", "ready")
    assert pair.active is active


def test_the_command_goes_on_elsewhere(pair: Pair, undisturbed: list[object]) -> None:
    active = pair.active
    command = [sys.executable, "-m", "tandem", "generate", "It is a truth", "--endpoint", ",".join(pair.endpoints)]
    command += ["--max-tokens", "300", "--ignore-eos", "--temperature", "0"]
    whole = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begun = process.stdout.read(100)
        active.kill()
        assert begun + process.stdout.read() == whole
    active.start()
    pair.until("both", "ready")
