"""grpc.health.v1 as truth: what the core's last word and this process's own state amount to.

`liveness`: this process turns. `readiness` and ``: warm, making progress, not draining; a standby is ready too.
`tandem.Active` and the services' own names: requests are served here and now.
"""

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health

from scheduler_svc.frontend.core_link import CoreLink

SERVICE = "tandem.v1.GenerationService"
VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
ACTIVE = "tandem.Active"
READINESS = "readiness"
LIVENESS = "liveness"

_Status = health_pb2.HealthCheckResponse


class Health:
    """The statuses of one frontend."""

    def __init__(self, link: CoreLink) -> None:
        self.servicer = health.HealthServicer()
        self._link = link
        self._draining = False

    async def run(self) -> None:
        """Follows the core until cancelled."""
        await self.servicer.set(LIVENESS, _Status.SERVING)
        await self._update()
        seen = 0
        while True:
            seen = await self._link.next_state(seen)
            await self._update()

    async def drain(self) -> None:
        """Nothing new is taken from now on; the process still lives."""
        self._draining = True
        await self._update()

    @property
    def is_ready(self) -> bool:
        """Able to serve or to take over."""
        state = self._link.state
        if self._draining or state is None:
            return False
        return state.standby or (state.HasField("model") and state.progressing)

    @property
    def is_active(self) -> bool:
        """Requests are served here and now."""
        state = self._link.state
        return not self._draining and state is not None and state.active

    async def _update(self) -> None:
        ready, active = self.is_ready, self.is_active
        for name, serving in (
            ("", ready),
            (READINESS, ready),
            (ACTIVE, active),
            (SERVICE, active),
            (VLLM_ENGINE, active),
        ):
            await self.servicer.set(name, _Status.SERVING if serving else _Status.NOT_SERVING)
