"""A service on a network of its own: schedulers, a worker, a group of two nodes, and a client, each in a namespace.

Links of schedulers are slow and lossy. What ends is started again at once, as kubelet does.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpc import aio

from shared.rpc import until_serving
from tests.net.host import Host, Names
from tests.net.switch import Switch, run_in
from tests.patience import PATIENCE_S
from tests.service.pod import Pod
from tests.service.tandem_process import load

NETWORK = "10.77.0."
WORKERS = {"worker", "node-0"}
"""Where each of the two groups answers."""
DELAY_S, LOSS = 0.02, 0.01
STEP_TIMEOUT_S = 2.0
_TIMEOUT = ["--step-timeout", f"{STEP_TIMEOUT_S:g}"]
_WORKER = ["worker", "--model", "tiny", "--dtype", "float64", "--kv-cache-memory", "32", *_TIMEOUT]
_GROUP = ["--tensor-parallel", "2", "--nnodes", "2", "--master-addr", "node-0", "--node-rank"]
_SCHEDULER = ["scheduler", "--model", "tiny", "--workers", "dns:///workers:50052", *_TIMEOUT]
_SPREAD = ["--max-num-seqs", "8"]  # a worker that has two more streams than the other gets no further ones
_PEERS = ["--resolve-interval", "0.2", "--peers", "dns:///schedulers:50051", "--drain", "handoff", *_SPREAD]


class Cluster:
    """Hosts by what they are, and what runs on them."""

    def __init__(self, folder: Path, switch: Switch, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.names = Names(folder)
        self.hosts: dict[str, Host] = {}
        self.pods: dict[str, Pod] = {}
        self._stack = stack
        for number, name in enumerate(("client", "scheduler-0", "scheduler-1", "worker", "node-0", "node-1"), start=2):
            self.hosts[name] = host = Host(switch, f"{NETWORK}{number}", self.names)
            stack.callback(host.close)
            if name.startswith("scheduler"):
                host.link.sent.delay_s = host.link.received.delay_s = DELAY_S
                host.link.sent.loss = host.link.received.loss = LOSS
        self.tell("workers", *WORKERS)
        self.tell("node-0", "node-0")

    def tell(self, name: str, *hosts: str) -> None:
        """A name leads to these hosts."""
        self.names.tell(**{name: [self.hosts[host].address for host in hosts]})

    def start(self) -> None:
        """All but the second scheduler; returns when both workers are there."""
        self.run("worker", *_WORKER)
        for rank in range(2):
            self.run(f"node-{rank}", *_WORKER, *_GROUP, str(rank))
        self.start_scheduler("scheduler-0", "scheduler-0")
        self.until_connected("scheduler-0")

    def run(self, name: str, *arguments: str) -> None:
        """On the host of that name; its address is what it listens on."""
        host = self.hosts[name]
        self.pods[name] = host.run(self.folder / name, *arguments, "--host", host.address)
        self._stack.callback(self.pods[name].stop)

    def start_scheduler(self, name: str, *all_schedulers: str) -> None:
        """Returns when it is ready; these are its peers and itself."""
        self.tell("schedulers", *all_schedulers)
        self.run(name, *_SCHEDULER, *_PEERS)
        self.until_serving(name, "readiness")

    def until_serving(self, name: str, service: str) -> None:
        """Waits for a health service of a scheduler."""
        endpoint = f"{self.hosts[name].address}:50051"
        asyncio.run(asyncio.wait_for(until_serving(endpoint, service), PATIENCE_S))

    def connected(self, scheduler: str) -> dict[str, int]:
        """The workers that a scheduler has, and how many streams run on each."""
        with contextlib.suppress(aio.AioRpcError):
            told = asyncio.run(load(f"{self.hosts[scheduler].address}:50051")).workers
            hosts = {host.address: name for name, host in self.hosts.items()}
            return {hosts[worker.endpoint.partition(":")[0]]: worker.running for worker in told if worker.connected}
        return {}

    def until_connected(self, scheduler: str) -> None:
        """Waits until it has both workers."""
        until(lambda: self.connected(scheduler).keys() == WORKERS, f"{scheduler} with both workers")

    def until_busy(self, scheduler: str) -> None:
        """Waits until streams run on both."""
        until(lambda: sum(map(bool, self.connected(scheduler).values())) == len(WORKERS), "work for both workers")

    def restart(self, *names: str) -> None:
        """SIGTERM to pods of one group, the last one first; they leave their name, and it comes back with them."""
        statuses = {name: len(self.pods[name].statuses) for name in names}
        self.tell("workers", *WORKERS - set(names))
        for name in reversed(names):
            self.pods[name].main().terminate()
        for name in names:
            ended = self.pods[name].until_ended(statuses[name] + 1)
            assert ended == 0, f"{name} ended with {ended}\n{self.pods[name].log.read_text()}"
        self.tell("workers", *WORKERS)


class Client:
    """The client in its namespace, and what it saw at the end."""

    def __init__(self, cluster: Cluster) -> None:
        command = [*cluster.hosts["client"].words, sys.executable, "-m", "tests.net.client", "dns:///schedulers:50051"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        cluster._stack.callback(self._process.kill)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._asks, self._answers = self._process.stdin, self._process.stdout
        self._expect("ready")

    def until_moving(self) -> None:
        """Waits until each stream has had another message."""
        self._asks.write("\n")
        self._asks.flush()
        self._expect("moving")

    def _expect(self, line: str) -> None:
        assert (said := self._answers.readline()) == f"{line}\n", f"the client says {said!r}"

    def end(self) -> dict[str, Any]:
        """See tests.net.client."""
        seen: dict[str, Any] = json.loads(self._process.communicate(timeout=PATIENCE_S)[0])
        return seen


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits for it."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Started. This process must be in a namespace of its own."""
    run_in(os.getpid(), "ip", "link", "set", "lo", "up")
    with contextlib.ExitStack() as stack:
        switch = Switch()
        stack.callback(switch.close)
        switch.add(os.getpid(), f"{NETWORK}1", observes=True)
        cluster = Cluster(folder, switch, stack)
        cluster.start()
        yield cluster
