"""A step that fails or never ends, on any rank, costs a pause: each is noticed, and no stream loses or changes a token.

The oracle is the undisturbed run, in float64. The clients ping every second through the silence.
"""

import asyncio
import os
from pathlib import Path

import psutil
import pytest
from grpc import aio

from shared.pb import generation_pb2 as pb
from shared.rpc import CHANNEL_OPTIONS
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Output, Tandem, follow, generate_all, running, until_idle

HOOK = """
import os, sys, time

if "worker_svc.main" in sys.orig_argv:
    from worker_svc.runner.runner import TorchRunner

    order = os.environ["STEP_FAULT"] + sys.orig_argv[sys.orig_argv.index("--rank") + 1]
    step = TorchRunner.step

    def faulty(self, plan):
        if len(plan.rows) and os.path.exists(order):
            with open(order) as file:
                how = file.read()
            os.unlink(order)
            if how == "raises":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            time.sleep(1000)
        return step(self, plan)

    TorchRunner.step = faulty
"""
"""Run at the start of every interpreter: a rank whose order file appears does so with its next step, once."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(HOOK)
    arguments = ["--dtype", "float64", "--kv-cache-memory", "64", "--step-timeout", "2", "--tensor-parallel", "2"]
    env = {"PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]), "STEP_FAULT": str(folder / "order-")}
    with running(folder / "log", *arguments, **env) as service:
        yield service


def requests() -> list[pb.GenerateRequest]:
    made = []
    for number in range(3):
        request = pb.GenerateRequest(text="It is a truth universally" + " and" * number)
        request.sampling.seed = number
        request.sampling.temperature = number % 2
        request.stopping.max_tokens = 50
        request.stopping.ignore_eos = True
        made.append(request)
    return made


async def disturbed(service: Tandem, order: Path, how: str) -> list[Output]:
    wanted = requests()
    outputs = [Output() for _ in wanted]
    pinging = list((dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1000}).items())
    async with aio.insecure_channel(service.endpoint, options=pinging) as channel:
        streams = asyncio.gather(*(follow(channel, *pair) for pair in zip(wanted, outputs, strict=True)))
        while not all(output.token_ids for output in outputs):
            await asyncio.sleep(0.005)
        order.write_text(how)
        await asyncio.wait_for(streams, PATIENCE_S)
    assert not order.exists(), "the run was too short to disturb"
    return outputs


@pytest.mark.parametrize(("how", "rank"), [("raises", 1), ("hangs", 0)])
def test_streams_survive_a_step(service: Tandem, how: str, rank: int) -> None:
    expected = asyncio.run(generate_all(service.endpoint, requests()))
    order = service.log.parent / f"order-{rank}"
    before = {process.pid for process in service.processes("rank")}
    outputs = asyncio.run(disturbed(service, order, how))
    for output, other in zip(outputs, expected, strict=True):
        assert (output.token_ids, output.text, output.finish) == (other.token_ids, other.text, other.finish)
    asyncio.run(until_idle(service.endpoint))
    if how == "hangs":
        assert not any(psutil.pid_exists(pid) for pid in before), "a rank that hangs is no worker any more"
