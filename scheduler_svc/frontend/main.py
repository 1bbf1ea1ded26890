"""One frontend process: `python -m scheduler_svc.frontend.main --config JSON` (FrontendConfig).

Wires the parts and owns their start and end. It listens at once and is ready when the health service on its own port
says so: the parent watches `readiness` there. SIGTERM drains: not ready, new calls refused, running streams finish
within the grace period, exit status 0.
"""

import argparse
import asyncio
import gc
import sys
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import Any

import structlog
import uvloop
from grpc import aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client.core import Metric
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.grammar_compiler import GrammarCompiler
from scheduler_svc.frontend.health import SERVICE, VLLM_ENGINE, Health
from scheduler_svc.frontend.matcher import GrammarTokenizer
from scheduler_svc.frontend.metrics import frontend_metrics
from scheduler_svc.frontend.peer_service import PeerService
from scheduler_svc.frontend.prompts import Prompts
from scheduler_svc.frontend.service import GenerationService
from scheduler_svc.frontend.tracing import Tracing, make_tracing
from scheduler_svc.frontend.vllm_engine.service import VllmEngine
from scheduler_svc.process_metrics import process_metrics
from scheduler_svc.snapshots import push
from shared.errors import StartupError, Unavailable
from shared.model_config import SamplingDefaults, load_model_config
from shared.pb import generation_pb2_grpc, peer_pb2_grpc
from shared.ports import unix_endpoint
from shared.process import STARTUP_FAILED, die_with_parent, raise_file_limit, stop_signals
from shared.rpc import listen, make_server
from shared.settings import from_json
from shared.telemetry import configure_logging
from shared.tls import server_credentials
from shared.tokens import Authentication, Tokens

OPERATORS_ONLY = (
    "/tandem.v1.GenerationService/GetStats",
    f"/{VLLM_ENGINE}/SubscribeKvEvents",
    f"/{VLLM_ENGINE}/FlushCache",
)
"""They tell of all tenants, or act on all."""

OWN_FILES = 128
"""Files and sockets that a frontend needs itself, and a bit more."""
MAX_CONCURRENT_STREAMS = 10_000
"""On one connection; further calls wait at the client."""
MAX_PENDING_CALLS = 20_000
"""That have come and were not looked at yet. gRPC's own bounds, from 1,000 on by chance and 3,000 surely, would end a
burst of calls as CANCELLED, as if their clients had left; what is looked at is refused with a reason and a hint."""
MOST_BESIDE_PROMPT = 4 << 20
"""Bytes of a message beside the text of its prompt: keys, schemas, token ids."""
_CLOSING_SECONDS = 0.5
"""For what is no Generate call, health watchers for instance, after the last stream has finished."""

_log = structlog.get_logger(__name__)


class Frontend:
    """All parts of one frontend, in one event loop."""

    def __init__(self, config: FrontendConfig, tracing: Tracing | None = None) -> None:
        """Raises StartupError where the model folder can't be served. `tracing` in place of the configured one."""
        self._config = config
        model = load_model_config(config.model, config.model_name)
        defaults = model.sampling_defaults if config.use_generation_config else SamplingDefaults()
        self._prompts = Prompts(config)
        self.link = CoreLink(config.core_socket, config.core_timeout)
        self._health = Health(self.link)
        self._peers = PeerService(self.link)
        tokens = self._prompts.tokenizer, self._prompts.vocabulary
        tokenizer = GrammarTokenizer(*tokens, model.vocabulary_size, model.eos_token_ids)
        self._grammars = GrammarCompiler(config.model, tokenizer, config.grammar_timeout)
        self._tracing = tracing or make_tracing(config.otlp_endpoint, model.name)
        parts = self._prompts, self._grammars, self.link, self._tracing
        self.service = GenerationService(model, defaults, *parts, fair_by=config.fair_by)
        thinks = self._prompts.thoughts.end is not None
        self._engine = VllmEngine(config.model, model, defaults, self.service, self.link, self._health, thinks=thinks)
        self._credentials = server_credentials(config, as_child=True)
        self._server = self._make_server()
        self._health_server = make_server(share_port=True)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, self._health_server)
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0
        """Where clients are served, known after start()."""

    def _make_server(self) -> aio.Server:
        age = round(self._config.max_connection_age * 1000)
        options = [
            ("grpc.max_connection_age_ms", age),
            ("grpc.max_allowed_incoming_connections", self._config.max_connections or _files_for_connections()),
            ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
            ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
            # Its length is known before a message is read: one that is too long costs nothing.
            ("grpc.max_receive_message_length", self._config.max_prompt_bytes + MOST_BESIDE_PROMPT),
        ]
        tokens = self._config.token_file
        interceptors = [] if tokens is None else [Authentication(Tokens(tokens), OPERATORS_ONLY)]
        read_timeout = self._config.read_timeout
        server = make_server(share_port=True, interceptors=interceptors, options=options, read_timeout=read_timeout)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.service, server)
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._engine, server)  # type: ignore[no-untyped-call]
        peer_pb2_grpc.add_PeerServiceServicer_to_server(self._peers, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        names = (SERVICE, VLLM_ENGINE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        return server

    async def start(self) -> None:
        """Listens and connects to the core. Raises StartupError if a port is taken."""
        config = self._config
        self.port = listen(self._server, config.host, config.port, self._credentials)
        if config.health_socket is not None:
            self._health_server.add_insecure_port(unix_endpoint(config.health_socket))
        if config.health_port is not None:
            listen(self._health_server, config.host, config.health_port)
        for background in (self.link.run(), self._health.run()):
            self._run(background)
        self._telling = asyncio.create_task(push(self._config.metrics_socket, self._metrics))
        await self._server.start()
        await self._health_server.start()
        gc.freeze()  # what the start has made lives as long as the process: no collection needs to look at it
        _log.info("frontend listens", host=config.host, port=self.port, tls=self._credentials is not None)

    def _metrics(self) -> Iterator[Metric]:
        yield from process_metrics("frontend")
        yield from frontend_metrics(self.service.counts, self.link)

    def _run(self, background: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(background))

    async def failed(self) -> None:
        """Waits for a background part to end, which only a bug does; raises what it raised."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Drains within the grace period, or hands off, then ends everything."""
        await self._health.drain()
        self._peers.leave(hands_off=self._config.hands_off)
        draining = asyncio.create_task(self.service.drain())
        timeout_s = 0.0 if self._config.hands_off else self._config.drain_timeout
        await asyncio.wait([draining], timeout=timeout_s)
        self.link.fail_all(Unavailable("this server shuts down; resume on another"))
        await asyncio.gather(self._server.stop(_CLOSING_SECONDS), self._health_server.stop(_CLOSING_SECONDS))
        for task in (background := [*self._tasks, self._telling, draining]):
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        await asyncio.to_thread(self._tracing.close)
        self._prompts.close()
        self._grammars.close()


def _files_for_connections() -> int:
    files = raise_file_limit()
    if files <= OWN_FILES:
        raise StartupError(f"only {files} open files are allowed (ulimit -Hn): {OWN_FILES + 1} and more are needed")
    return files - OWN_FILES


async def serve(config: FrontendConfig) -> None:
    """Runs one frontend until SIGTERM or SIGINT."""
    frontend = Frontend(config)
    await frontend.start()
    with stop_signals() as stopped:
        stopping = asyncio.create_task(stopped.wait())
        failing = asyncio.create_task(frontend.failed())
        await asyncio.wait((stopping, failing), return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        await failing
    await frontend.stop()
    failing.cancel()


def main() -> int:
    """Exit status 0, or STARTUP_FAILED after one line on standard error."""
    die_with_parent()
    parser = argparse.ArgumentParser(description="One frontend process of a scheduler")
    parser.add_argument("--config", required=True, type=partial(from_json, FrontendConfig))
    configure_logging("frontend")
    try:
        uvloop.run(serve(parser.parse_args().config))
    except StartupError as error:
        print(f"tandem scheduler: {error}", file=sys.stderr)
        return STARTUP_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
