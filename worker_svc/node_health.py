"""The health service of a node that serves nothing else: the same probes fit every pod of a group."""

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shared.rpc import listen, make_server
from shared.tls import server_credentials
from worker_svc.config import WorkerConfig


class NodeHealth:
    """On `--port`, and in plain text on `--health-port`: alive as long as its launcher turns, ready as it is told."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._health = health.aio.HealthServicer()
        self._servers = [make_server(share_port=False) for _ in range(2)]
        for server in self._servers:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)

    async def start(self) -> None:
        """Listens; not ready. Raises StartupError where an address can't be had."""
        config, (server, plain) = self._config, self._servers
        listen(server, config.host, config.port, server_credentials(config))
        if config.health_port is not None:
            listen(plain, config.host, config.health_port)
        await self._health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        await self.tell(ready=False)
        for each in self._servers:
            await each.start()

    async def tell(self, *, ready: bool) -> None:
        """Whether its ranks are warm, and not draining."""
        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", "readiness"):
            await self._health.set(service, serving if ready else not_serving)

    async def stop(self) -> None:
        """At once."""
        for server in self._servers:
            await server.stop(grace=None)
