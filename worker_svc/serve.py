"""Rank 0's process: gRPC server, health, signals, draining."""

import asyncio
import contextlib
import secrets
from pathlib import Path

import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared import __version__
from shared.model_config import ModelConfig, load_model_config
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.ports import address
from shared.process import stop_signals
from shared.rpc import listen, make_server
from shared.tls import server_credentials
from shared.tokens import Authentication, Tokens
from shared.types import WorkerDescription
from worker_svc.config import WorkerConfig
from worker_svc.model_checks import dtype_name
from worker_svc.progress import BEAT_S, Progress
from worker_svc.runner.build import start_rank
from worker_svc.runner.counts import count_runner
from worker_svc.runner.group import GroupRunner
from worker_svc.runner.runner import Runner
from worker_svc.servicer import WorkerServicer
from worker_svc.stats import StepStats
from worker_svc.step_threads import Group, StepThreads
from worker_svc.store import Store

_log = structlog.get_logger(__name__)

MEASURE_S = 1.0

_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
SERVICE = _SERVICE.full_name
OPERATORS_ONLY = tuple(f"/{SERVICE}/{method.name}" for method in _SERVICE.methods)
"""All of them: whoever sends plans reads the K/V of every tenant."""
SHOWN_BY = "a scheduler: --worker-token-file, `tandem drain`: --token-file"
"""Who calls a worker, and its flag for the token."""


class WorkerServer:
    """The endpoint of a worker group: listens at once, answers when warm, drains when told to stop."""

    def __init__(self, config: WorkerConfig, progress: Progress, stats: StepStats) -> None:
        self._config = config
        self._progress = progress
        self._stats = stats
        self._runner: Runner | None = None
        self._servicer = WorkerServicer(config.lease_timeout)
        self._health = health.aio.HealthServicer()
        self._threads: StepThreads | None = None
        self._credentials = server_credentials(config, as_child=True)
        interceptors = []
        if config.token_file is not None:
            interceptors.append(Authentication(Tokens(config.token_file, SHOWN_BY), OPERATORS_ONLY))
        self._server = make_server(share_port=False, interceptors=interceptors)
        self._health_server = make_server(share_port=False)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server)
        for server in (self._server, self._health_server):
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Listens; gives the port. Raises StartupError where the address can't be had."""
        config = self._config
        port = listen(self._server, config.host, config.port, self._credentials)
        if config.health_port is not None:
            listen(self._health_server, config.host, config.health_port)
        await self._update_health()
        await self._server.start()
        await self._health_server.start()
        return port

    async def load(self, rendezvous: Path | Store) -> WorkerDescription:
        """Joins the other ranks, loads the model, and begins to answer. Raises StartupError."""
        model = load_model_config(self._config.folder)
        group = await asyncio.to_thread(_load_group, self._config, model, rendezvous, self._progress)
        description = _describe(self._config, model, group.runner)
        self._runner = group.runner
        await self.answer(group, description)
        return description

    async def answer(self, group: Group, description: WorkerDescription) -> None:
        """The group is warm: calls that wait go on."""
        self._threads = StepThreads(group, self._stats)
        self._progress.warm()
        self._servicer.serve(self._threads, description)
        await self._update_health()

    async def watch(self) -> None:
        """Beats and keeps the health service true, for ever."""
        while True:
            self._progress.beat()
            await self._update_health()
            await asyncio.sleep(BEAT_S)

    async def until_stopped(self, stopped: asyncio.Event) -> None:
        """Waits for the event. Raises what broke the group, of which only a successor can take the place."""
        assert self._threads is not None, "it answers"
        waiting = asyncio.create_task(stopped.wait()), asyncio.wrap_future(self._threads.broken)
        ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in ended:
            one.result()

    async def measure(self) -> None:
        """Keeps true what is told of the runner and its memory, for ever."""
        while True:
            if self._runner is not None:
                count_runner(self._runner, self._stats)
            await asyncio.sleep(MEASURE_S)

    async def drain(self) -> None:
        """Opens no new stream; lets the one that is open go on until it ends, at most for the drain timeout."""
        self._servicer.draining = True
        await self._update_health()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout):
                await self.released()

    async def released(self) -> None:
        """Waits until no scheduler holds the group."""
        await self._servicer.lease.released()

    async def stop(self) -> None:
        """Ends what is still open, and the other ranks."""
        await asyncio.gather(self._server.stop(grace=0.5), self._health_server.stop(grace=0.5))
        if self._threads is not None:
            await asyncio.to_thread(self._threads.close)

    async def _update_health(self) -> None:
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        stalled = self._progress.stalled(self._config.step_timeout)
        ready = self._threads is not None and not self._servicer.draining and not stalled
        await self._health.set("liveness", serving)
        for service in ("", "readiness", SERVICE):
            await self._health.set(service, serving if ready else not_serving)


async def serve(config: WorkerConfig, rendezvous: Path | Store, progress: Progress, stats: StepStats) -> None:
    """Serves until SIGTERM. Raises StartupError where it can't begin to, and what breaks the group."""
    server = WorkerServer(config, progress, stats)
    port = await server.start()
    background = [asyncio.create_task(server.watch()), asyncio.create_task(server.measure())]
    try:
        description = await server.load(rendezvous)
        with stop_signals() as stopped:  # until here SIGTERM just ends the process: a load can't be interrupted
            print(ready_line(config, description, port), flush=True)
            await server.until_stopped(stopped)
            _log.info("draining")
            await server.drain()
    finally:
        for task in background:
            task.cancel()
        await server.stop()


def ready_line(config: WorkerConfig, description: WorkerDescription, port: int) -> str:
    """The one line on stdout."""
    return (
        f"tandem worker ready on {address(config.host, port)} (model {description.model_name}, {description.dtype}, "
        f"{description.num_blocks} blocks of {description.block_size} tokens, "
        f"tensor parallel {description.tensor_parallel_size}, attention {description.attention})"
    )


def _load_group(config: WorkerConfig, model: ModelConfig, rendezvous: Path | Store, progress: Progress) -> GroupRunner:
    runner, ranks = start_rank(config, model, 0, rendezvous)
    return GroupRunner(runner, ranks, progress)


def _describe(config: WorkerConfig, model: ModelConfig, runner: Runner) -> WorkerDescription:
    limits = runner.batch.limits
    return WorkerDescription(
        fingerprint=model.fingerprint,
        model_name=model.name,
        dtype=dtype_name(config, model),
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        max_model_length=limits.max_model_len,
        vocabulary_size=limits.vocabulary_size,
        eos_token_ids=model.eos_token_ids,
        tensor_parallel_size=config.tensor_parallel,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        version=__version__,
        attention=runner.attention,
        worker=secrets.randbits(64),
    )
