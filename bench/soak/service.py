"""The processes of a soaked service: started, started again when they end, found by role, measured, and stopped.

Stands in for what runs pods. Owns the ports, the links between them and the folder of all that they write.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.soak.link import Link
from shared.ports import address, find_free
from shared.rpc import until_serving

HOST = "127.0.0.1"
ROLES = {
    "core": "scheduler_svc.core_process",
    "frontend": "scheduler_svc.frontend.main",
    "launcher": "tandem worker",
    "rank": "worker_svc.main",
    "scheduler": "tandem scheduler",
}
"""What the command line of each process holds."""
WATCH_S = 0.1
STOPPING_S = 60.0
LEAVING_S = 5.0


@dataclass(slots=True)
class Pod:
    """One process that is started again whenever it ends, with its children."""

    name: str
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    statuses: list[int] = field(default_factory=list)
    """Of its lives that are over."""

    def start(self, environment: dict[str, str]) -> None:
        """Another life."""
        self.starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    def family(self) -> list[psutil.Process]:
        """It and its children, those that live."""
        if self.process is None:
            return []
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


class Service:
    """Schedulers, one of which serves, and workers behind links."""

    def __init__(self, folder: Path, schedulers: int, workers: int, step_timeout: float) -> None:
        """All files go below `folder`. Two ranks for the first worker, one for the others."""
        self.scratch = folder / "tmp"
        self.scratch.mkdir(parents=True)
        self.links = [Link(HOST, find_free(HOST), find_free(HOST)) for _ in range(workers)]
        ports = [find_free(HOST) for _ in range(schedulers)]
        self.endpoints = [address(HOST, port) for port in ports]
        timeout = ["--step-timeout", str(step_timeout)]
        reached = ["--workers", ",".join(address(HOST, link.port) for link in self.links)]
        peers = ["--peers", ",".join(self.endpoints), "--drain", "handoff"] if schedulers > 1 else []
        self.pods = [
            self._pod(folder, "scheduler", *reached, *peers, *timeout, "--frontends", "2", "--port", str(port))
            for port in ports
        ]
        for number, link in enumerate(self.links):
            ranks = ["--tensor-parallel", "1" if number else "2"]
            memory = ["--dtype", "float64", "--block-size", "16", "--num-kv-blocks", "96", "--max-num-seqs", "16"]
            self.pods.append(self._pod(folder, "worker", *ranks, *memory, *timeout, "--port", str(link.target)))
        self._environment = {**os.environ, "TMPDIR": str(self.scratch), "TANDEM_LOG_LEVEL": "WARNING"}
        self._watching: asyncio.Task[None] | None = None

    def _pod(self, folder: Path, command: str, *options: str) -> Pod:
        words = [sys.executable, "-m", "tandem", command, "--model", "tiny", *options]
        return Pod(command, words, folder / f"{command}-{options[-1]}.log")

    async def start(self) -> None:
        """Until it serves."""
        for link in self.links:
            await link.start()
        for pod in self.pods:
            pod.start(self._environment)
        self._watching = asyncio.create_task(self._watch())
        for endpoint in self.endpoints:
            await until_serving(endpoint, "readiness")
        serving = [asyncio.create_task(until_serving(endpoint, "tandem.Active")) for endpoint in self.endpoints]
        await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
        for task in serving:
            task.cancel()

    async def _watch(self) -> None:
        while True:
            for pod in self.pods:
                if pod.process is not None and (status := pod.process.poll()) is not None:
                    pod.statuses.append(status)
                    pod.start(self._environment)
            await asyncio.sleep(WATCH_S)

    def processes(self, role: str) -> list[psutil.Process]:
        """Those that live."""
        return [process for name, process in self.everyone() if name == role]

    def everyone(self) -> Iterator[tuple[str, psutil.Process]]:
        """Every process with its role."""
        for pod in self.pods:
            for process in pod.family():
                with suppress(psutil.Error):
                    words = " ".join(process.cmdline())
                    for role, mark in ROLES.items():
                        if mark in words and process.status() != psutil.STATUS_ZOMBIE:
                            yield role, process

    async def stop(self) -> list[str]:
        """Told to stop, in order. What is wrong then: statuses, and what remains."""
        if self._watching is not None:
            self._watching.cancel()
        wrong = []
        for pod in self.pods:
            family = pod.family()
            if pod.process is not None and pod.process.poll() is None:
                pod.process.send_signal(signal.SIGTERM)
            if (status := await self._ended(pod)) != 0:
                wrong.append(f"{pod.name} ended with {status} when it was told to stop: {pod.log}")
            _, alive = await asyncio.to_thread(psutil.wait_procs, family, LEAVING_S)
            wrong += [f"process {process.pid} of {pod.name} is left" for process in alive if not _is_dead(process)]
        for link in self.links:
            await link.close()
        wrong += [f"file {path} is left" for path in self.scratch.rglob("*")]
        return wrong

    async def _ended(self, pod: Pod) -> int | None:
        assert pod.process is not None
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(pod.process.wait, STOPPING_S)
        return None

    def kill(self) -> None:
        """At once, whatever state it is in."""
        if self._watching is not None:
            self._watching.cancel()
        for pod in self.pods:
            for process in pod.family():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if pod.process is not None:
                pod.process.wait()


def _is_dead(process: psutil.Process) -> bool:
    """Also where nobody has asked for its status: it was the child of one that is dead."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
