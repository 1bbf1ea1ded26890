"""Worker groups that come and go behind one name, as pods behind a headless Service, while requests run.

Each worker has a loopback address of its own; the name's records are lines of a file. The oracle is the undisturbed
run, in float64, where a replay gives the same tokens.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from shared.model_config import load_model_config
from shared.pb import generation_pb2 as pb
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.ports import find_free
from tandem.models import model_folder
from tests.patience import PATIENCE_S
from tests.service.scrape import scrape_until
from tests.service.tandem_process import Tandem, generate_all, load, running, until_idle

PAUSE_S = 0.2
"""Of a client between two requests: load that takes all there is would take it from the workers that start."""
NAME = "workers.test"
RESOLVER = """
import pathlib, socket
real, records = socket.getaddrinfo, pathlib.Path({path!r})
def getaddrinfo(host, port, *args, **kwargs):
    if host != {name!r}:
        return real(host, port, *args, **kwargs)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (line, port)) for line in records.read_text().split()]
    if not found:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")
    return found
socket.getaddrinfo = getaddrinfo
"""


class Scheduler(Tandem):
    command = "scheduler"


class Pods:
    """Workers that run, each at its own address; `records` are those that the name has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = _port_of_all()
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self._last = 1
        self.tell()

    def start(self) -> str:
        """A worker at a new address, which the name has from now on."""
        host = self.address()
        command = [sys.executable, "-m", "tandem", "worker", "--model", "tiny", "--dtype", "float64"]
        command += ["--host", host, "--port", str(self.port), "--kv-cache-memory", "32"]
        with (self.folder / host).open("w") as log:
            self.workers[host] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(self.folder)}
            )
        self.tell()
        return host

    def address(self) -> str:
        """One that was never used."""
        self._last += 1
        return f"127.0.0.{self._last}"

    def end(self, host: str, fate: signal.Signals) -> int:
        """Ends a worker; the name loses its address at once, as that of a pod that is no longer ready."""
        worker = self.workers.pop(host)
        self.tell()
        worker.send_signal(fate)
        return worker.wait(timeout=PATIENCE_S)

    def tell(self, *others: str) -> None:
        """The name has the workers' addresses, and these."""
        (self.folder / "records").write_text("\n".join((*self.workers, *others)))


def _port_of_all() -> int:
    """A port that is free on every address that the pods may get."""
    while True:
        port = find_free("127.0.0.1")
        with contextlib.suppress(OSError):
            for number in range(2, 20):
                with socket.socket() as probe:
                    probe.bind((f"127.0.0.{number}", port))
            return port


class Service:
    """A scheduler that knows its workers by name alone, and the workers."""

    def __init__(self, scheduler: Scheduler, pods: Pods, metrics_port: int) -> None:
        self.scheduler = scheduler
        self.endpoint = scheduler.endpoint
        self.pods = pods
        self.metrics_port = metrics_port

    def workers(self) -> dict[str, pb.WorkerLoad]:
        """By host, as GetLoad tells."""
        return {worker.endpoint.rpartition(":")[0]: worker for worker in asyncio.run(load(self.endpoint)).workers}

    def until(self, condition: Callable[[dict[str, pb.WorkerLoad]], bool]) -> None:
        """Waits for what GetLoad tells of the workers; while the core is away it tells nothing."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if condition(self.workers()):
                    return
            assert time.monotonic() < deadline, "the workers never came to what was waited for"
            time.sleep(0.05)

    def until_connected(self, *hosts: str) -> None:
        """Waits until exactly these workers are known, and connected."""
        self.until(lambda workers: workers.keys() == set(hosts) and all(one.connected for one in workers.values()))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("groups")
    (folder / "sitecustomize.py").write_text(RESOLVER.format(path=str(folder / "records"), name=NAME))
    pods = Pods(folder)
    hosts = [pods.start(), pods.start()]
    metrics_port = find_free("127.0.0.1")
    arguments = ["--model", "tiny", "--workers", f"dns:///{NAME}:{pods.port}", "--resolve-interval", "0.2"]
    arguments += ["--metrics-port", str(metrics_port)]
    path = os.pathsep.join([str(folder), os.getcwd()])
    try:
        with running(folder / "log", *arguments, kind=Scheduler, PYTHONPATH=path) as scheduler:
            service = Service(scheduler, pods, metrics_port)
            service.until_connected(*hosts)
            yield service
    finally:
        for worker in pods.workers.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(worker.pid).children(recursive=True):
                    child.kill()
            worker.kill()
            worker.wait()


def requests() -> list[pb.GenerateRequest]:
    """Greedy and sampled ones, some with a prompt that the others share."""
    made = []
    for number in range(6):
        request = pb.GenerateRequest(text="It is a truth universally" + " acknowledged" * (number % 3 * 30))
        request.sampling.seed = number
        request.sampling.temperature = number % 2 * 0.8
        request.stopping.max_tokens = 150
        request.stopping.ignore_eos = True
        made.append(request)
    return made


def under_load(service: Service, change: Callable[[], None]) -> None:
    """While `change` runs, clients ask again and again; each gets what the undisturbed run gave."""
    wanted = requests()
    undisturbed = asyncio.run(generate_all(service.endpoint, wanted))

    async def client(changing: "asyncio.Task[None]", number: int) -> int:
        count = 0
        while not changing.done():
            (output,) = await generate_all(service.endpoint, [wanted[number]])
            expected = undisturbed[number]
            assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
            assert output.finish == expected.finish
            count += 1
            await asyncio.sleep(PAUSE_S)
        return count

    async def scenario() -> list[int]:
        changing = asyncio.create_task(asyncio.to_thread(change))
        counts = await asyncio.gather(*(client(changing, number) for number in range(len(wanted))))
        await changing
        return counts

    assert all(asyncio.run(asyncio.wait_for(scenario(), 4 * PATIENCE_S)))
    asyncio.run(until_idle(service.endpoint))


def drained(service: Service, host: str) -> None:
    """What an operator does before a worker is to be stopped."""
    command = [sys.executable, "-m", "tandem", "drain", f"{host}:{service.pods.port}"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    service.until(lambda workers: "drained" in workers[host].problem)


def replaced(service: Service, host: str, fate: signal.Signals) -> None:
    """A worker ends, and another one comes at another address."""
    assert service.pods.end(host, fate) == (0 if fate is signal.SIGTERM else -fate)
    service.pods.start()
    service.until_connected(*service.pods.workers)


def test_a_rolling_restart_under_load_loses_nothing(service: Service) -> None:
    """The first worker is just told to stop; the second one is drained by hand before."""
    first, second = service.pods.workers

    def restart() -> None:
        replaced(service, first, signal.SIGTERM)
        drained(service, second)
        replaced(service, second, signal.SIGTERM)

    under_load(service, restart)


def test_every_worker_is_killed_in_turn_under_load(service: Service) -> None:
    hosts = list(service.pods.workers)
    under_load(service, lambda: [replaced(service, host, signal.SIGKILL) for host in hosts])


def test_a_core_that_is_killed_finds_all_workers_again(service: Service) -> None:
    def kill() -> None:
        (core,) = service.scheduler.processes("core")
        core.kill()
        service.until(lambda _: core not in service.scheduler.processes("core"))
        service.until_connected(*service.pods.workers)

    under_load(service, kill)


class Described(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that answers Describe."""

    def __init__(self, **description: Any) -> None:
        self._description = worker_pb2.DescribeResponse(**description)

    def Describe(self, request, context):
        return self._description


@contextlib.contextmanager
def described(service: Service, **description: Any) -> Iterator[str]:
    """Such a worker among the pods; its host."""
    server = grpc.server(ThreadPoolExecutor(2))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Described(**description), server)
    host = service.pods.address()
    server.add_insecure_port(f"{host}:{service.pods.port}")
    server.start()
    try:
        service.pods.tell(host)
        yield host
    finally:
        service.pods.tell()
        server.stop(0).wait()


@pytest.mark.parametrize(
    ("description", "problem"),
    [
        ({"fingerprint": "another", "model_name": "bert"}, "serves bert"),
        ({"block_size": 32}, "block_size 32"),
        ({"dtype": "bfloat16"}, "--dtype float64"),
        ({"vocabulary_size": 7}, "vocabulary_size 7"),
        ({"max_num_seqs": 1}, "max_num_seqs 1"),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_and_the_rest_serves(
    service: Service, description: dict[str, Any], problem: str
) -> None:
    model = load_model_config(model_folder("tiny"))
    fitting = {
        "fingerprint": model.fingerprint,
        "dtype": "float64",
        "block_size": 64,
        "num_blocks": 64,
        "max_model_length": 1 << 20,
        "vocabulary_size": model.vocabulary_size,
        "max_num_seqs": 1 << 10,
        "max_num_batched_tokens": 1 << 20,
    }
    with described(service, **{**fitting, **description}) as host:
        service.until(lambda workers: host in workers and problem in workers[host].problem)
        address = f"{host}:{service.pods.port}"
        scrape_until(service.metrics_port, lambda seen: seen.value("tandem_group_refused", worker=address) == 1)
        (request, *_) = requests()
        assert asyncio.run(generate_all(service.endpoint, [request]))[0].finish
        seen = service.workers()[host]
        assert seen.refused and not seen.connected
    service.until_connected(*service.pods.workers)
