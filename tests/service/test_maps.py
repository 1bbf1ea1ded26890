"""Every per-request map is empty again, in whatever way requests end and whatever dies meanwhile.

Core engine and frontend run inside the test, so that it can look into them; the worker is a process that it kills.
"""

import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
from grpc import aio

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.engine import Engine
from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.main import Frontend
from shared.model_config import load_model_config
from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from shared.ports import find_free
from tandem.models import model_folder
from tests.patience import PATIENCE_S

MODEL = model_folder("tiny")
ENDINGS = ("finishes", "is cancelled", "is too late", "is aborted", "is wrong", "stops", "has three samples")


class Worker:
    """A worker process on a fixed port, started again by the test."""

    def __init__(self) -> None:
        self.port = find_free("127.0.0.1")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        arguments = ["--model", "tiny", "--port", str(self.port), "--dtype", "float64", "--kv-cache-memory", "64"]
        return subprocess.Popen([sys.executable, "-m", "tandem", "worker", *arguments], stdout=subprocess.DEVNULL)

    def die_and_return(self) -> None:
        """As a supervisor would have it."""
        self.process.kill()
        self.process.wait()
        self.process = self._start()


@contextlib.asynccontextmanager
async def service(folder: Path, worker: Worker) -> AsyncIterator[tuple[Engine, Frontend]]:
    endpoint = f"127.0.0.1:{worker.port}"
    config = SchedulerConfig(model=MODEL, workers=(endpoint,), worker_loss_timeout=PATIENCE_S)
    engine = Engine(config, load_model_config(MODEL).fingerprint, scheduler=3, instance=1, hash_seed=2)
    frontend = Frontend(FrontendConfig(model=MODEL, core_socket=folder / "core.sock"))
    running = asyncio.create_task(engine.run(str(folder / "core.sock")))
    await frontend.start()
    try:
        yield engine, frontend
    finally:
        await frontend.stop()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def one(stub: generation_pb2_grpc.GenerationServiceStub, number: int, ending: str) -> str:
    """One request that ends in the given way; how it did."""
    request = pb.GenerateRequest(request_id=f"request-{number}", text=f"It is a truth universally {number % 5}")
    request.stopping.max_tokens = 60
    request.stopping.ignore_eos = True
    timeout = None
    match ending:
        case "is wrong":
            request.stopping.max_tokens = 0
        case "is too late":
            timeout = random.Random(number).uniform(0.05, 0.4)
        case "stops":
            request.stopping.stop.extend(["e", "a"])
        case "has three samples":
            request.n = 3
    call = stub.Generate(request, timeout=timeout)
    received = 0
    try:
        async for _ in call:
            received += 1
            if received == 3 and ending == "is cancelled":
                call.cancel()
            elif received == 3 and ending == "is aborted":
                await stub.Abort(pb.AbortRequest(request_id=request.request_id))
    except aio.AioRpcError as error:
        return error.code().name
    except asyncio.CancelledError:
        return "CANCELLED"
    return "OK"


def test_nothing_is_left_of_two_hundred_requests_and_two_dead_workers(tmp_path: Path) -> None:
    worker = Worker()

    async def scenario() -> None:
        async with service(tmp_path, worker) as (engine, frontend):
            async with aio.insecure_channel(f"127.0.0.1:{frontend.port}") as channel:
                stub = generation_pb2_grpc.GenerationServiceStub(channel)
                await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=PATIENCE_S)
                tasks = []
                for number in range(210):
                    tasks.append(asyncio.create_task(one(stub, number, ENDINGS[number % len(ENDINGS)])))
                    await asyncio.sleep(0.01)
                    if number in (70, 140):
                        await asyncio.to_thread(worker.die_and_return)
                endings = await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)
            counted = {
                ending: {endings[i] for i in range(210) if ENDINGS[i % len(ENDINGS)] == ending} for ending in ENDINGS
            }
            assert counted["finishes"] == counted["stops"] == counted["has three samples"] == {"OK"}
            assert counted["is wrong"] == {grpc.StatusCode.INVALID_ARGUMENT.name}
            assert "DEADLINE_EXCEEDED" in counted["is too late"] <= {"DEADLINE_EXCEEDED", "OK"}
            assert "CANCELLED" in counted["is cancelled"] and "CANCELLED" in counted["is aborted"]
            assert counted["is cancelled"] | counted["is aborted"] <= {"CANCELLED", "OK"}
            deadline = time.monotonic() + PATIENCE_S
            while engine.held or frontend.link.held or frontend.service.live:
                assert time.monotonic() < deadline, (engine.held, frontend.link.held, frontend.service.live)
                await asyncio.sleep(0.02)
            engine.check_invariants()
            (group,) = engine.state().groups
            assert group.running == 0 and group.free_blocks == group.total_blocks > 0

    try:
        asyncio.run(scenario())
    finally:
        worker.process.kill()
        worker.process.wait()
