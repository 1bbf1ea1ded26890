"""Runs the election of this scheduler: gives it the time, the peers and the workers, and does what it decides.

Dials the workers while the election says so, or asks them if they answer. Knows nothing of requests: a
LeadershipListener does.
"""

import asyncio
import time
from typing import Protocol

import structlog

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.election import TICK_S, YIELD_S, Election, Role
from scheduler_svc.peers import Peers
from scheduler_svc.worker_groups import WorkerGroups
from scheduler_svc.worker_probe import WorkerProbe
from shared.resolve import is_name

_log = structlog.get_logger(__name__)


class LeadershipListener(Protocol):
    """Who owns the requests. Each call is short and never awaits."""

    def leads(self) -> None:
        """Requests may go to the workers from now on."""

    def stands_by(self) -> None:
        """Requests end: the workers are let go."""

    def claim_changed(self) -> None:
        """What this scheduler says of itself is another thing now."""


class Leadership:
    """The election, and what follows from it."""

    def __init__(
        self,
        config: SchedulerConfig,
        scheduler: int,
        workers: WorkerGroups,
        probe: WorkerProbe,
        listener: LeadershipListener,
    ) -> None:
        """`scheduler` is this scheduler's id."""
        self.election = Election(
            scheduler,
            config.peer_timeout,
            time.monotonic(),
            alone=not config.peers,
            yield_after=YIELD_S + (config.resolve_interval if any(map(is_name, config.workers)) else 0.0),
        )
        self._workers = workers
        self._probe = probe
        self._listener = listener
        self._peers = Peers(config, self.election, self._follow_up)
        self._role, self._claim = Role.LISTENING, self.election.claim
        self._elected = asyncio.Event()
        self._dialling: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """For ever. Raises what ends the links to the workers."""
        await asyncio.gather(self._peers.run(), self._tick(), self._dial(), self._probe.run())

    def workers_changed(self) -> None:
        """A worker has come or is lost."""
        workers = self._workers
        self.election.workers(
            time.monotonic(),
            connected=workers.any_connected,
            complete=workers.all_connected,
            held=workers.any_held,
            reaching=workers.any_answers or self._probe.reaches,
        )
        self._follow_up()

    def led_before(self, term: int) -> None:
        """A frontend says that this scheduler led when its last core process died."""
        self.election.led_before(term, time.monotonic())
        self._follow_up()

    async def _tick(self) -> None:
        while True:
            self.workers_changed()
            await asyncio.sleep(TICK_S)

    async def _dial(self) -> None:
        while True:
            await self._elected.wait()
            self._dialling = asyncio.create_task(self._workers.run())
            try:
                await asyncio.wait([self._dialling])
            finally:
                self._dialling.cancel()
            if not self._dialling.cancelled():
                self._dialling.result()

    def _follow_up(self) -> None:
        role, claim = self.election.role, self.election.claim
        self._probe.want(self.election.probes)
        if role is not self._role:
            self._role = role
            _log.info("role", role=role.value, term=claim.term, leader=self.election.leader())
            self._enter(role)
        if claim != self._claim:
            self._claim = claim
            self._listener.claim_changed()

    def _enter(self, role: Role) -> None:
        if self.election.dials:
            self._elected.set()
        if role is Role.LEADING:
            self._listener.leads()
        elif role is Role.STANDBY:
            self._elected.clear()
            self._listener.stands_by()
            if self._dialling is not None:
                self._dialling.cancel()
