"""A running `tandem serve` for tests: its processes by role, and calls to it through the generated stubs."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
from grpc import aio

from shared.errors import StartupError
from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from shared.ports import find_free, require_free
from tests.patience import PATIENCE_S

ROLES = {
    "core": "scheduler_svc.core_process",
    "frontend": "scheduler_svc.frontend.main",
    "launcher": "tandem worker",
    "rank": "worker_svc.main",
}
"""What the command line of each process holds."""


def free_pair() -> int:
    """The first of two free ports, one after the other: metrics of a scheduler and of its worker."""
    while True:
        port = find_free("127.0.0.1")
        with contextlib.suppress(StartupError):
            require_free("127.0.0.1", port + 1)
            return port


class Tandem:
    """`tandem serve` with the given arguments and environment, on a free port."""

    command = "serve"

    def __init__(self, log: Path, *arguments: str, **env: str) -> None:
        self.port = find_free("127.0.0.1")
        self.endpoint = f"127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "tandem", self.command, "--port", str(self.port), *arguments]
        environment = {**os.environ, "TMPDIR": str(log.parent), **env}  # what a killed process leaves is the test's
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)

    def wait_ready(self) -> str:
        """The line that it prints when ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended with {self.process.wait()} before it was ready: {self.log.read_text()}"
        return line

    def processes(self, role: str) -> list[psutil.Process]:
        """Its live processes of one role, oldest first."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if ROLES[role] in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return sorted(found, key=lambda child: child.create_time())

    def everyone(self) -> list[psutil.Process]:
        """All its processes."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def stop(self) -> int:
        """Ctrl-C; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=PATIENCE_S)


Kind = TypeVar("Kind", bound=Tandem)


@contextlib.contextmanager
def running(log: Path, *arguments: str, kind: type[Kind] = Tandem, **env: str) -> Iterator[Kind]:
    """A ready service, stopped at the end; no process of it may remain."""
    service = _started(kind, log, *arguments, **env)
    try:
        yield service
        family = service.everyone()
        assert service.stop() == 0, log.read_text()
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive, f"left behind: {alive}"
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in service.everyone():
                process.kill()


def _started(kind: type[Kind], log: Path, *arguments: str, **env: str) -> Kind:
    """When it is ready. A port that was free may be taken before it is bound, by what else runs: then with others."""
    while True:
        service = kind(log, *arguments, **env)
        try:
            service.wait_ready()
            return service
        except AssertionError:
            if "can't listen on" not in log.read_text():
                raise


@dataclass
class Output:
    """One sample, put together from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: pb.Finish | None = None
    usage: pb.Usage | None = None
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    echo: pb.EchoedPrompt | None = None

    def add(self, response: pb.GenerateResponse) -> None:
        """Appends one delta."""
        assert self.finish is None, "a delta after the last one"
        assert not (self.token_ids and response.prompt_logprobs), "the prompt after the output"
        assert len(response.logprobs) in (0, len(response.token_ids)), "logprobs of other tokens"
        self.logprobs += response.logprobs
        self.prompt_logprobs += response.prompt_logprobs
        self.echo = response.echo if response.HasField("echo") else self.echo
        self.text += response.text
        self.token_ids += response.token_ids
        if response.HasField("finish"):
            self.finish, self.usage = response.finish, response.usage


async def follow(channel: aio.Channel, request: pb.GenerateRequest, *outputs: Output) -> None:
    """Adds the request's deltas to `outputs`, one per sample, as they come."""
    async for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(request):
        outputs[response.index - request.sample_index].add(response)
    assert all(output.finish for output in outputs), "the stream ended without its last delta"


async def generate(channel: aio.Channel, request: pb.GenerateRequest) -> list[Output]:
    """All samples of a request, whole."""
    outputs = [Output() for _ in range(request.n or 1)]
    await follow(channel, request, *outputs)
    return outputs


async def generate_all(endpoint: str, requests: Sequence[pb.GenerateRequest]) -> list[Output]:
    """The first sample of each request, all running at once."""
    async with aio.insecure_channel(endpoint) as channel:
        return [outputs[0] for outputs in await asyncio.gather(*(generate(channel, request) for request in requests))]


async def load(endpoint: str) -> pb.GetLoadResponse:
    """How busy the service is."""
    async with aio.insecure_channel(endpoint) as channel:
        return await generation_pb2_grpc.GenerationServiceStub(channel).GetLoad(pb.GetLoadRequest())


async def until_idle(endpoint: str) -> pb.GetLoadResponse:
    """The load when nothing is queued or running and all blocks are free."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        answer = await load(endpoint)
        held = sum(worker.total_blocks - worker.free_blocks for worker in answer.workers)
        if answer.queued == answer.running == held == 0:
            return answer
        assert time.monotonic() < deadline, f"not idle: {answer}"
        await asyncio.sleep(0.05)


@contextlib.contextmanager
def ending_early(endpoint: str, tokens: int) -> Iterator[None]:
    """What begins within ends there too, before it has so many tokens; then nothing runs or holds a block."""
    before = asyncio.run(_output_tokens(endpoint))
    yield
    asyncio.run(until_idle(endpoint))
    assert asyncio.run(_output_tokens(endpoint)) - before < tokens


async def _output_tokens(endpoint: str) -> int:
    async with aio.insecure_channel(endpoint) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return int((await stub.GetStats(pb.GetStatsRequest())).generation_tokens)
