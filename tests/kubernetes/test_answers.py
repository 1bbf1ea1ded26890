"""The programs of a manifest, started with its arguments and variables, answer its probes and drain.

Only ports, names that a cluster resolves and folders that it mounts are other ones here.
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
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.ports import find_free
from tandem import Client, ClientSecurity
from tests.kubernetes.pods import of_component, of_kind
from tests.kubernetes.rendered import Things, objects
from tests.kubernetes.rules_programs import arguments, environment
from tests.patience import PATIENCE_S
from tests.security.authority import Authority

SERVING = health_pb2.HealthCheckResponse.SERVING
TOKEN, TOKENS = "operator" * 4, 200
FILES = {".pem": "tls.crt", ".key": "tls.key"}


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
        """The arguments with the ports, names and folders here."""
        container = of_component(self._things, component).main
        words = list(arguments(container, self._things))
        for number in container.ports.values():
            words = [word.replace(f"port={number}", f"port={self.port(component, number)}") for word in words]
        for name, other, number in (("workers", "worker", 50052), ("schedulers", "scheduler", 50051)):
            here = f"localhost:{self.port(other, number)}"
            words = [word.replace(f"tandem-{name}:{number}", here) for word in words]
        for mounted, here in (("/tls/", self._folder / component), ("/tokens/", self._folder)):
            words = [word.replace(f"={mounted}", f"={here}/") for word in words]
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
        """In plain text, whatever the other ports speak."""
        with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
            request = health_pb2.HealthCheckRequest(service=service)
            return bool(health_pb2_grpc.HealthStub(channel).Check(request, timeout=1.0).status == SERVING)
        return False


def make_secrets(things: Things, folder: Path) -> ClientSecurity:
    """What cert-manager and the operator would put into the Secrets; how a client is let in then."""
    authority = Authority(folder)
    for certificate in of_kind(things, "Certificate"):
        if "dnsNames" in certificate["spec"]:
            own = folder / certificate["metadata"]["name"].removeprefix("tandem-")
            own.mkdir(exist_ok=True)
            for file in authority.sign("signed", "localhost", *certificate["spec"]["dnsNames"]):
                file.replace(own / FILES[file.suffix])
            (own / "ca.crt").write_bytes(authority.file.read_bytes())
    (folder / "tokens").write_text(TOKEN)
    return ClientSecurity(tls_ca=authority.file, token_file=folder / "tokens")


@pytest.mark.parametrize("overlay", ["cpu-demo", "cpu-demo+mtls"])
def test_probes_are_answered_and_a_drain_cuts_no_stream(overlay: str, texts: dict[str, str], tmp_path: Path) -> None:
    things = objects(texts[overlay])
    security = make_secrets(things, tmp_path) if of_kind(things, "Certificate") else ClientSecurity()
    while True:
        with contextlib.suppress(PortTaken):
            run(Cluster(things, tmp_path), security)
            return


def run(cluster: Cluster, security: ClientSecurity) -> None:
    """From the start of both programs to their end, which is that of a namespace: all are told at once."""
    with cluster.running("scheduler") as scheduler, cluster.running("worker") as worker:
        cluster.until_probes_pass("worker", worker)
        cluster.until_probes_pass("scheduler", scheduler)
        with Client(f"localhost:{cluster.port('scheduler', 50051)}", security=security, resume_timeout=0) as client:
            tokens = 0
            for delta in client.generate("It is", max_tokens=TOKENS, ignore_eos=True):
                if not tokens:
                    worker.send_signal(signal.SIGTERM)
                    scheduler.send_signal(signal.SIGTERM)
                tokens += len(delta.token_ids)
        assert tokens == TOKENS, "the drains cut the stream"
        assert [process.wait(timeout=PATIENCE_S) for process in (scheduler, worker)] == [0, 0]
