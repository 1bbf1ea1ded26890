"""The programs of a manifest, started with its arguments and variables, answer its probes and stop as it wants them to.

Only ports, and names that a cluster resolves, are other ones here.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.ports import find_free
from tandem import Client
from tests.kubernetes.pods import of_component
from tests.kubernetes.rendered import Things, objects
from tests.kubernetes.rules_programs import arguments, environment
from tests.patience import PATIENCE_S

SERVING = health_pb2.HealthCheckResponse.SERVING


class PortTaken(Exception):
    """A port that was free is another process's by now."""


class Cluster:
    """One pod of each component of an overlay, as processes of this machine."""

    def __init__(self, things: Things, folder: Path) -> None:
        self._things, self._folder = things, folder
        self._ports: dict[tuple[str, int], int] = {}

    def port(self, component: str, number: int) -> int:
        """The port here that stands for one of a pod."""
        return self._ports.setdefault((component, number), find_free("127.0.0.1"))

    def words(self, component: str) -> list[str]:
        """The arguments with the ports here."""
        container = of_component(self._things, component).main
        words = list(arguments(container, self._things))
        for number in container.ports.values():
            words = [word.replace(f"port={number}", f"port={self.port(component, number)}") for word in words]
        for name, other, number in (("workers", "worker", 50052), ("schedulers", "scheduler", 50051)):
            here = f"127.0.0.1:{self.port(other, number)}"
            words = [word.replace(f"dns:///tandem-{name}:{number}", here) for word in words]
        return words

    @contextlib.contextmanager
    def running(self, component: str) -> Iterator[subprocess.Popen[bytes]]:
        """The program, killed at the end if it still runs."""
        variables = environment(of_component(self._things, component).main, self._things)
        command = [sys.executable, "-m", "tandem", *self.words(component)]
        with (self._folder / f"{component}.log").open("w") as log:
            own = {**os.environ, **variables, "TMPDIR": str(self._folder)}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=own)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def until_probes_pass(self, component: str, process: subprocess.Popen[bytes]) -> None:
        """Asks all probes as the kubelet does, one after the other, until each has been answered. Raises PortTaken."""
        for kind, probe in of_component(self._things, component).main.probes():
            address = f"127.0.0.1:{self.port(component, probe['grpc']['port'])}"
            deadline = time.monotonic() + PATIENCE_S
            while not self._passes(address, probe["grpc"]["service"]):
                log = (self._folder / f"{component}.log").read_text()
                if "can't listen on" in log:
                    raise PortTaken
                assert process.poll() is None and time.monotonic() < deadline, (kind, log)
                time.sleep(0.1)

    @staticmethod
    def _passes(address: str, service: str) -> bool:
        with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
            request = health_pb2.HealthCheckRequest(service=service)
            return bool(health_pb2_grpc.HealthStub(channel).Check(request, timeout=1.0).status == SERVING)
        return False


def stops(process: subprocess.Popen[bytes]) -> int:
    """The exit status after SIGTERM."""
    process.send_signal(signal.SIGTERM)
    return process.wait(timeout=PATIENCE_S)


def test_probes_are_answered_and_text_comes(texts: dict[str, str], tmp_path: Path) -> None:
    while True:
        with contextlib.suppress(PortTaken):
            run(Cluster(objects(texts["cpu-demo"]), tmp_path))
            return


def run(cluster: Cluster) -> None:
    """From the start to the end of both programs."""
    with cluster.running("scheduler") as scheduler, cluster.running("worker") as worker:
        cluster.until_probes_pass("worker", worker)
        cluster.until_probes_pass("scheduler", scheduler)
        with Client(f"127.0.0.1:{cluster.port('scheduler', 50051)}") as client:
            assert client.complete("It is", max_tokens=4).samples[0].token_ids
        assert stops(scheduler) == 0 and stops(worker) == 0
