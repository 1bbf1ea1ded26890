"""A scheduler here and a worker in another network namespace, with a tunnel between them that is made a black hole.

A program, for a network namespace of its own: `unshare --net python -m tests.service.black_hole FOLDER`. Prints JSON.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from grpc import aio

from shared.pb import generation_pb2 as pb
from shared.rpc import until_serving
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Output, Tandem, follow, load, running, until_idle
from tests.service.tunnel import Tunnel, run_in

HERE, THERE, PORT = "10.77.0.1", "10.77.0.2", 50052
STEP_TIMEOUT_S = 2.0
TOKENS_BEFORE = 10
DOWN_S = 0.5
"""That the link stays down after its loss was noticed."""
CASES = {"both ways": (True, True), "to the worker": (True, False), "from the worker": (False, True)}


class Scheduler(Tandem):
    command = "scheduler"


@contextlib.contextmanager
def service(folder: Path) -> Iterator[tuple[str, Tunnel]]:
    """A scheduler's endpoint, and the link to its worker."""
    run_in(os.getpid(), "ip", "link", "set", "lo", "up")
    command = [sys.executable, "-m", "tandem", "worker", "--model", "tiny", "--dtype", "float64"]
    command += ["--host", THERE, "--port", str(PORT), "--kv-cache-memory", "32"]
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    tunnel = worker = None
    try:
        _until_apart(holder.pid)
        tunnel = Tunnel((os.getpid(), holder.pid), (HERE, THERE))
        run_in(holder.pid, "ip", "link", "set", "lo", "up")
        with (folder / "worker").open("w") as log:
            worker = subprocess.Popen(
                ["nsenter", "--target", str(holder.pid), "--net", *command], stdout=log, stderr=log
            )
        workers = ["--workers", f"{THERE}:{PORT}", "--step-timeout", str(STEP_TIMEOUT_S)]
        with running(folder / "scheduler", "--model", "tiny", *workers, kind=Scheduler) as scheduler:
            asyncio.run(asyncio.wait_for(until_serving(scheduler.endpoint, "tandem.Active"), PATIENCE_S))
            yield scheduler.endpoint, tunnel
    finally:
        for process in (worker, holder):
            if process is not None:
                process.kill()
                process.wait()
        if tunnel is not None:
            tunnel.close()


def _until_apart(pid: int) -> None:
    """Waits until a process is in a network namespace of its own."""
    own, deadline = Path("/proc/self/ns/net").readlink(), time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}/ns/net").readlink() == own:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def requests() -> list[pb.GenerateRequest]:
    """Greedy and sampled ones."""
    made = [pb.GenerateRequest(text=f"It is a truth {number}") for number in range(4)]
    for number, request in enumerate(made):
        request.sampling.seed = number
        request.sampling.temperature = number % 2 * 0.8
        request.stopping.max_tokens = 200
        request.stopping.ignore_eos = True
    return made


async def read_all(endpoint: str, tunnel: Tunnel, down: tuple[bool, bool]) -> tuple[list[Output], float]:
    """What clients got while the link went down and came back; seconds until the scheduler said so."""
    outputs = [Output() for _ in requests()]
    async with aio.insecure_channel(endpoint) as channel:
        reading = [follow(channel, *pair) for pair in zip(requests(), outputs, strict=True)]
        streams = asyncio.gather(*reading)
        noticed = 0.0
        if any(down):
            await _until(lambda: all(len(output.token_ids) >= TOKENS_BEFORE for output in outputs))
            began = time.monotonic()
            _set(tunnel, down)
            await _until_lost(endpoint)
            noticed = time.monotonic() - began
            await asyncio.sleep(DOWN_S)
            assert not streams.done(), "they ended without a worker"
            _set(tunnel, (False, False))
        await asyncio.wait_for(streams, PATIENCE_S)
    await until_idle(endpoint)
    return outputs, noticed


def _set(tunnel: Tunnel, down: tuple[bool, bool]) -> None:
    for way, is_down in zip(tunnel.ways, down, strict=True):
        way.is_down = is_down


async def _until_lost(endpoint: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(worker.connected for worker in (await load(endpoint)).workers):
        assert time.monotonic() < deadline, "the black hole was never noticed"
        await asyncio.sleep(0.02)


async def _until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def main(folder: Path) -> None:
    """Every case, one after the other."""
    found = {}
    with service(folder) as (endpoint, tunnel):
        undisturbed, _ = asyncio.run(read_all(endpoint, tunnel, (False, False)))
        for name, down in CASES.items():
            outputs, noticed = asyncio.run(read_all(endpoint, tunnel, down))
            same = [
                (one.token_ids, one.text, one.finish) == (other.token_ids, other.text, other.finish)
                for one, other in zip(outputs, undisturbed, strict=True)
            ]
            found[name] = {"noticed_s": round(noticed, 2), "same": same}
        for way in tunnel.ways:
            way.delay_s, way.loss = 0.02, 0.02
        outputs, _ = asyncio.run(read_all(endpoint, tunnel, (False, False)))
        found["slow and lossy"] = {
            "same": [one.token_ids == other.token_ids for one, other in zip(outputs, undisturbed, strict=True)]
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
