"""Whether the server at an endpoint is the active one, as its health service says.

Without a server, or before it has spoken, the answer is no. Knows nothing of requests.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.dialer import Dialer

ACTIVE = "tandem.Active"
PAUSE_S = 0.5
"""Before a server is asked again that has ended the call."""

_CONFIG = {"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ACTIVE}}
_HEALTH_CHECKED = [("grpc.service_config", json.dumps(_CONFIG))]
"""gRPC's client-side health checking: it watches that service, and the channel is READY where it is SERVING."""


class Activity(Protocol):
    """Of one endpoint, from the first time that it is asked for."""

    channel: Any
    """To be closed in the end."""

    @property
    def is_active(self) -> bool:
        """Whether its server serves requests, by its last word."""

    def drop(self) -> None:
        """Nobody asks any more."""


Follow = Callable[[Dialer, str], Activity]
"""Begins to follow an endpoint."""


class ThreadActivity:
    """For threads: one reads what the health service says. gRPC's own such thread complains when its channel closes."""

    def __init__(self, dialer: Dialer, target: str) -> None:
        self.channel = dialer.thread_channel(target)
        self.is_active = False
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        """Until the channel is closed."""
        watch = health_pb2_grpc.HealthStub(self.channel).Watch
        while True:
            try:
                for answer in watch(health_pb2.HealthCheckRequest(service=ACTIVE), wait_for_ready=True):
                    self.is_active = answer.status == health_pb2.HealthCheckResponse.SERVING
            except grpc.RpcError:
                self.is_active = False
            except ValueError:
                return
            time.sleep(PAUSE_S)

    def drop(self) -> None:
        """Ends the thread."""
        self.channel.close()


class AsyncActivity:
    """For asyncio: gRPC itself follows, and is asked."""

    def __init__(self, dialer: Dialer, target: str) -> None:
        self.channel = dialer.channel(target, _HEALTH_CHECKED)
        self.channel.get_state(try_to_connect=True)

    @property
    def is_active(self) -> bool:
        """Whether its server serves requests, by its last word."""
        return self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    def drop(self) -> None:
        """The channel closes with its last reference."""
