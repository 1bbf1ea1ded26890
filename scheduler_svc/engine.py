"""The core process's one loop: carries messages between frontends, the pure core and the worker groups.

Every event is applied to the core at once; plans are made in a callback that runs after the events of one turn of the
loop, so that all of them are taken before the next schedule(). Decides nothing about sequences: the core does.
"""

import asyncio
import time

from scheduler_svc.cache_news import CacheReporter
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core import Load, Request
from scheduler_svc.core_state import core_state, load_of
from scheduler_svc.election import Role
from scheduler_svc.frontend_links import FrontendLinks
from scheduler_svc.leadership import Leadership
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.monitor import Monitor
from scheduler_svc.served_core import ServedCore
from scheduler_svc.worker_events import WorkerEvents
from scheduler_svc.worker_probe import WorkerProbe
from shared.errors import Unavailable
from shared.pb import core_pb2
from shared.pb.generation_pb2 import GetStatsResponse, RequestStats

STATE_INTERVAL_S = 0.5
STANDBY = "another scheduler is the active one: go on there"


class Engine:
    """Wires one core, its worker groups and its frontends: the listener of the frontends and of the leadership."""

    def __init__(
        self, config: SchedulerConfig, fingerprint: str, *, scheduler: int, instance: int, hash_seed: int
    ) -> None:
        """`scheduler` is the id that peers know, `instance` the one that workers know: new with each core process."""
        self._config = config
        self._frontends = FrontendLinks(self)
        self._cache = CacheReporter(self._frontends.tell_cache)
        self._served = ServedCore(config, fingerprint, hash_seed, self._cache.attach, self.broke)
        self._requests = LiveRequests(config, self._served, self._frontends)
        self.events = WorkerEvents(
            config,
            self._served,
            self._requests,
            self._cache,
            instance=instance,
            changed=self._workers_changed,
            broke=self.broke,
        )
        self.workers = self.events.groups
        self._planning = self.events.planning
        probe = WorkerProbe(config, self._served.fits)
        self._leadership = Leadership(config, scheduler, self.workers, probe, self)
        self._election = self._leadership.election
        self._broken: asyncio.Future[None] | None = None
        self._monitor = Monitor()

    async def run(self, socket_path: str) -> None:
        """Serves until cancelled. Raises StartupError where a worker serves another model, and what `broke` tells."""
        self._broken = asyncio.get_running_loop().create_future()
        async with await self._frontends.serve(socket_path):
            await asyncio.gather(self._broken, self._tell_state(), self._leadership.run())

    def broke(self, error: Exception) -> None:
        """A bug: the state can't be trusted. The process ends; its successor gets every request again."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _tell_state(self) -> None:
        while True:
            await asyncio.sleep(STATE_INTERVAL_S)
            if not self.held:
                self._planning.progressed = time.monotonic()
            self._frontends.broadcast(self.state())
            self.events.end_without_worker(dials=self.is_leading)
            self._requests.end_late()
            self._requests.deliver_rest()

    @property
    def held(self) -> int:
        """Entries of all per-request maps, the core's included: 0 when nothing is live."""
        return self._requests.held

    @property
    def block_size(self) -> int:
        """Tokens of a K/V block; 0 before the first worker."""
        return self._served.core.config.block_size if self._served.core is not None else 0

    @property
    def is_leading(self) -> bool:
        """Whether it dials the workers; a standby does not."""
        return self._election.dials

    def load(self) -> Load:
        """How busy the service is; before the first worker, who waits for one."""
        waiting = 0 if self._served.core is not None else self._frontends.waiting
        return load_of(self._served, len(self._requests.early) + waiting)

    def check_invariants(self) -> None:
        """Asserts that the core's state is consistent. O(everything)."""
        self._served.running.check_invariants()

    # Frontends.

    def state(self) -> core_pb2.CoreState:
        """What frontends need to know."""
        progressing = not self.held or time.monotonic() - self._planning.progressed < self._config.step_timeout
        return core_state(self._election, self.load(), self.workers.links, self._served, progressing=progressing)

    def submit(self, request: Request) -> None:
        """Raises a TandemError to refuse it. Before this scheduler leads it waits."""
        if not self._election.accepts:
            raise Unavailable(STANDBY)
        self._requests.submit(request, early=self._election.role is not Role.LEADING)
        self._settle()

    def _settle(self) -> None:
        """What a verb of the core brings about beyond its answer: ends of sequences, rows to plan."""
        if self._served.core is not None:
            self._requests.deliver_rest()
            self._planning.wake_all()

    def cancel(self, key: int) -> None:
        """The frontend expects no answer."""
        if self._requests.cancel(key):
            self._planning.wake_all()

    def abort_by_id(self, request_id: str) -> bool:
        """Ends its sequences on whatever frontends they are."""
        found = self._requests.abort_by_id(request_id)
        self._planning.wake_all()
        return found

    def mask_ready(self, key: int, position: int, allowed: bytes) -> None:
        """A constrained sequence may go on."""
        self._requests.mask_ready(key, position, allowed)
        self._planning.wake_all()

    def left(self, peer: int) -> None:
        """Ends what nobody reads any more."""
        self._cache.watch(peer, False)
        self._requests.left(peer)
        self._planning.wake_all()

    def watch_cache(self, peer: int, watch: bool) -> None:
        """A frontend begins or ends following what is cached."""
        self._cache.watch(peer, watch)

    def flush_cache(self) -> bool:
        """Forgets what is cached; False while a request is live."""
        flushed = not self.held and (self._served.core is None or self._served.core.flush_cache())
        self._cache.tell()
        return flushed

    def request_ended(self, request: RequestStats) -> None:
        """For the statistics."""
        self._monitor.request_ended(request)

    def stats(self, max_requests: int) -> GetStatsResponse:
        """What the service has done."""
        return self._monitor.stats(max_requests, self.load().counters)

    def led_before(self, term: int) -> None:
        """This scheduler led when the core process before this one died."""
        self._leadership.led_before(term)

    # Leadership.

    def _workers_changed(self) -> None:
        self._leadership.workers_changed()
        self._frontends.broadcast(self.state())

    def leads(self) -> None:
        """Who waited goes to the core."""
        self.events.lead()
        self._requests.hand_over()
        self._settle()

    def stands_by(self) -> None:
        """Clients resume where the workers are."""
        self._requests.end_all(Unavailable(STANDBY))

    def claim_changed(self) -> None:
        """Peers and clients are told at once."""
        self._frontends.broadcast(self.state())
