"""A request that kills every worker it touches ends INTERNAL by itself; those beside it lose nothing."""

import asyncio
import os
from pathlib import Path

import grpc
from grpc import aio

from shared.pb import generation_pb2 as pb
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Output, follow, generate_all, running, until_idle

POISON = 1535
HOOK = f"""
import os, signal, sys

if "worker_svc.main" in sys.orig_argv:
    from worker_svc.runner.batch import BatchState

    fold = BatchState.fold

    def poisoned(self, plan):
        if {POISON} in plan.token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return fold(self, plan)

    BatchState.fold = poisoned
"""
"""Run at the start of every interpreter: a rank dies of a plan that holds the poisonous token."""


def request(ids: list[int]) -> pb.GenerateRequest:
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    made.sampling.seed = 1
    made.stopping.max_tokens = 100
    made.stopping.ignore_eos = True
    return made


def test_one_request_kills_every_worker_and_its_neighbours_go_on(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    innocent = [request([100 + number, 200, 300]) for number in range(5)]

    async def scenario(endpoint: str) -> tuple[BaseException | None, list[Output]]:
        outputs = [Output() for _ in range(6)]
        async with aio.insecure_channel(endpoint) as channel:
            wanted = [request([7, POISON, 8]), *innocent]
            streams = (follow(channel, *pair) for pair in zip(wanted, outputs, strict=True))
            ends = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), PATIENCE_S)
        assert not any(ends[1:]), ends
        return ends[0], outputs[1:]

    arguments = ["--dtype", "float64", "--kv-cache-memory", "64", "--step-timeout", "5"]
    with running(tmp_path / "log", *arguments, PYTHONPATH=path) as service:
        expected = asyncio.run(generate_all(service.endpoint, innocent))
        assert not any(POISON in output.token_ids for output in expected), "replayed tokens are part of a plan"
        end, outputs = asyncio.run(scenario(service.endpoint))
        assert isinstance(end, aio.AioRpcError) and end.code() is grpc.StatusCode.INTERNAL
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        asyncio.run(until_idle(service.endpoint))
