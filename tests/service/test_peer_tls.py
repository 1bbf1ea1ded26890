"""Two schedulers that know each other by certificates, in mutual TLS: they hear each other, and one follows the other.

The worker computes nothing: nobody asks for a token.
"""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.election import Election
from scheduler_svc.peers import Peers
from shared.model_config import load_model_config
from shared.pb import worker_pb2_grpc
from shared.ports import find_free
from shared.tls import server_credentials
from shared.types import WorkerDescription
from shared.wire import description_to_pb
from tandem import AsyncClient, ClientSecurity, Unavailable
from tandem.models import model_folder
from tests.patience import PATIENCE_S
from tests.security.authority import Authority, client, server
from tests.service.schedulers import Scheduler
from tests.service.test_worker_client import Worker


class IdleWorker(Worker):
    """Fits schedulers of the tiny model, and lets anybody have it."""

    async def Describe(self, request, context):
        shape = load_model_config(model_folder("tiny"))
        sizes = (16, 8, 64, shape.vocabulary_size, (0,), 1, 4, 64)
        return description_to_pb(WorkerDescription(shape.fingerprint, "tiny", "float64", *sizes, "1", "none"))


@pytest.mark.parametrize(("trusting", "advice"), [(False, "--peer-tls-ca"), (True, "an authority of --peer-tls-ca")])
def test_why_a_peer_is_not_heard_is_logged_once(tmp_path: Path, trusting: bool, advice: str) -> None:
    """With the flag to change."""
    another = Authority(tmp_path, "another").file if trusting else None

    async def scenario() -> list[Any]:
        listening = grpc.aio.server()
        port = listening.add_secure_port("127.0.0.1:0", server_credentials(server(Authority(tmp_path))))
        await listening.start()
        peers, model = (f"127.0.0.1:{port}",), model_folder("tiny")
        config = SchedulerConfig(model=model, workers=("127.0.0.1:1",), peers=peers, peer_tls_ca=another)
        with structlog.testing.capture_logs() as logs:
            tries = asyncio.Semaphore(0)
            running = asyncio.create_task(Peers(config, Election(1, 2.0, 0.0, alone=False), tries.release).run())
            async with asyncio.timeout(PATIENCE_S):
                for _ in range(4):
                    await tries.acquire()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await listening.stop(0)
        return [entry for entry in logs if entry["event"] == "no peer"]

    (told,) = asyncio.run(scenario())
    assert advice in told["reason"]


async def refusal(endpoint: str, security: ClientSecurity) -> str | None:
    """Why it does not serve; None if it does."""
    async with AsyncClient(endpoint, 1, security=security) as asking:
        try:
            await asking.load()
        except Unavailable as error:
            return str(error)
    return None


def test_peers_hear_each_other_over_mutual_tls_and_one_follows_the_other(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("scheduler")
    caller = client(authority, "caller")
    flags = ["--tls-cert", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(authority.file)]
    ports = [find_free("127.0.0.1"), find_free("127.0.0.1")]
    flags += ["--peer-tls-ca", str(authority.file), "--peers", ",".join(f"127.0.0.1:{port}" for port in ports)]

    async def scenario() -> None:
        idle = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(IdleWorker({}, 10**6), idle)
        worker = f"127.0.0.1:{idle.add_insecure_port('127.0.0.1:0')}"
        await idle.start()
        killed: set[Scheduler] = set()
        schedulers = [Scheduler(worker, tmp_path / f"log-{port}", *flags, port=port) for port in ports]
        try:
            async with asyncio.timeout(PATIENCE_S):
                active, standby = await settled(schedulers)
                killed.add(active)
                await asyncio.to_thread(active.kill)
                while await refusal(standby.endpoint, caller) is not None:
                    await asyncio.sleep(0.1)
        finally:
            for scheduler in {*schedulers} - killed:
                scheduler.kill()
            await idle.stop(0)

    async def settled(schedulers: list[Scheduler]) -> list[Scheduler]:
        """The one that serves, then the one that names it, as who has heard of it does."""
        while True:
            told = {one: await refusal(one.endpoint, caller) for one in schedulers}
            active, standby = sorted(schedulers, key=lambda one: told[one] is not None)
            if told[active] is None and active.endpoint in (told[standby] or ""):
                return [active, standby]
            await asyncio.sleep(0.1)

    asyncio.run(scenario())
