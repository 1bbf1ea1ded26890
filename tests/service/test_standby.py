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
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from shared.ports import find_free
from shared.rpc import ACTIVE_ENDPOINT
from tandem import Client
from tests.patience import PATIENCE_S
from tests.service.relay import Relay, Relays
from tests.service.schedulers import Disturbance, Scheduler, Worker, all_at_once, expected, running_worker

SERVING = health_pb2.HealthCheckResponse.SERVING
PAUSE_S = 0.05
"""Of a client between two requests: what starts meanwhile needs its share, too."""


class Pair:
    """Two schedulers, each behind links that can be cut, and who is active now."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        self.worker = worker
        self.relays = Relays()
        ports = [find_free("127.0.0.1"), find_free("127.0.0.1")]
        self.schedulers: list[Scheduler] = []
        self.endpoints: list[str] = []
        """Where clients reach them."""
        self.links: dict[Scheduler, dict[str, Relay]] = {}
        for port, other in (ports, reversed(ports)):
            targets = {"clients": f"127.0.0.1:{port}", "worker": worker.endpoint, "peer": f"127.0.0.1:{other}"}
            links = {name: self.relays.link(target) for name, target in targets.items()}
            peers = f"127.0.0.1:{port},{links['peer'].endpoint}"
            arguments = ["--peers", peers, "--drain", "handoff"]
            scheduler = Scheduler(links["worker"].endpoint, folder / f"log-{port}", *arguments, port=port)
            self.schedulers.append(scheduler)
            self.endpoints.append(links["clients"].endpoint)
            self.links[scheduler] = links

    def all_links(self, scheduler: Scheduler) -> list[Relay]:
        """To it and from it."""
        return [
            link
            for one in self.schedulers
            for name, link in self.links[one].items()
            if one is scheduler or name == "peer"
        ]

    def close(self) -> None:
        """Ends both."""
        for scheduler in self.schedulers:
            scheduler.kill()
        self.relays.close()

    def serving(self, service: str) -> list[Scheduler]:
        """Those that say so of a health service, and answer within a second."""
        return [scheduler for scheduler in self.schedulers if _serves(scheduler.endpoint, service)]

    def until(self, *roles: str) -> None:
        """Waits until one is active and both are ready; or only the former, without "ready"."""
        _until(lambda: len(self.serving("tandem.Active")) == 1 and len(self.serving("readiness")) >= len(roles))

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


def _stands_by(endpoint: str) -> bool:
    """Whether it sends clients on."""
    with grpc.insecure_channel(endpoint) as channel, contextlib.suppress(grpc.RpcError):
        generation_pb2_grpc.GenerationServiceStub(channel).GetLoad(pb.GetLoadRequest(), timeout=1.0)
        return False
    return True


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("standby")
    with running_worker(folder / "worker") as worker:
        pair = Pair(worker, folder)
        try:
            yield pair
        finally:
            pair.close()


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
        while not stop.wait(PAUSE_S):
            try:
                texts.add(client.complete("It is", max_tokens=5, temperature=0.0).text)
            except Exception as error:
                problems.append(repr(error))
    if len(texts) != 1:
        problems.append(f"outputs differ: {texts}")


def test_the_standby_is_ready_and_says_who_serves(pair: Pair, undisturbed: list[object]) -> None:
    standby = pair.standby
    where = pair.links[standby]["peer"].endpoint
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
            assert dict(refusal.value.trailing_metadata())[ACTIVE_ENDPOINT] == where
            assert where in refusal.value.details()
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
    try:
        under_load(pair, undisturbed, lambda: active.send(signal.SIGSTOP))
        pair.until()
        successor = pair.active
    finally:
        active.send(signal.SIGCONT)  # the tests after this one need both
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
    """Both see that it is free, for as long as it loads."""
    active = pair.active
    under_load(pair, undisturbed, pair.worker.kill_and_restart)
    pair.until("both", "ready")
    assert pair.active is active


def test_all_links_of_the_active_one_are_cut(pair: Pair, undisturbed: list[object]) -> None:
    """It lives on, alone; when it hears of the others again it stands by."""
    active = pair.active
    links = pair.all_links(active)

    def cut() -> None:
        for link in links:
            link.cut()

    under_load(pair, undisturbed, cut)
    pair.until("both", "ready")
    successor = pair.active
    for link in links:
        link.mend()
    _until(lambda: not _serves(active.endpoint, "tandem.Active") and _stands_by(active.endpoint))
    assert pair.active is successor is not active


def test_a_leader_that_reaches_no_worker_gives_way_to_a_peer_that_does(pair: Pair, undisturbed: list[object]) -> None:
    """They hear each other all the while."""
    active = pair.active
    link = pair.links[active]["worker"]
    under_load(pair, undisturbed, link.refuse)
    pair.until("both", "ready")
    successor = pair.active
    link.mend()
    assert pair.active is successor is not active


def test_a_leader_that_its_peer_does_not_hear_keeps_the_worker(pair: Pair, undisturbed: list[object]) -> None:
    """The worker tells the peer that somebody lives, for longer than it tries. Clients that ask there are sent on."""
    active, standby = pair.active, pair.standby
    for scheduler in pair.schedulers:
        pair.links[scheduler]["peer"].cut()
    try:
        _until(lambda: not _stands_by(standby.endpoint))
        _until(lambda: _stands_by(standby.endpoint))
        assert outputs(asyncio.run(all_at_once(pair.endpoints, lambda delta: None))) == outputs(undisturbed)
        assert pair.active is active
    finally:
        for scheduler in pair.schedulers:
            pair.links[scheduler]["peer"].mend()


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
