"""The core process's one loop: carries messages between frontends, the pure core and the worker groups.

Every event is applied to the core at once; plans are made in a callback that runs after the events of one turn of the
loop, so that all of them are taken before the next schedule(). Decides nothing about sequences: the core does.
"""

import asyncio
import time
from dataclasses import replace

import structlog

from scheduler_svc.cache_news import CacheReporter
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core import Counters, GroupLoad, Load, Request, Scheduler, StepOutputs
from scheduler_svc.early import EarlyRequests
from scheduler_svc.election import Role
from scheduler_svc.fitting import core_config, foreign, misfit
from scheduler_svc.frontend_links import FrontendLinks, peer_of
from scheduler_svc.leadership import Leadership
from scheduler_svc.monitor import Monitor
from scheduler_svc.peers import claim_to_pb
from scheduler_svc.queue_clock import QueueClock
from scheduler_svc.worker_client import Misfit
from scheduler_svc.worker_groups import WorkerGroups
from scheduler_svc.worker_probe import WorkerProbe
from shared.errors import Aborted, QueueFull, StartupError, TandemError, Unavailable
from shared.pb import core_pb2
from shared.pb.generation_pb2 import GetStatsResponse, RequestStats
from shared.resolve import is_name
from shared.types import StepPlan, StepResult, WorkerDescription

STATE_INTERVAL_S = 0.5
MASK_PATIENCE_S = 0.002
"""How long constrained sequences wait for each other's masks while their worker idles: one whose grammar is slow must
not hold up the others."""

_log = structlog.get_logger(__name__)

STANDBY = "another scheduler is the active one: go on there"


class Outgrown(TandemError):
    """Only a worker is left that needs another core than this one: the process ends, and its successor takes it."""


class Engine:
    """Wires one core, its worker groups and its frontends: the listener of all of them, and of the leadership."""

    def __init__(
        self, config: SchedulerConfig, fingerprint: str, *, scheduler: int, instance: int, hash_seed: int
    ) -> None:
        """`scheduler` is the id that peers know, `instance` the one that workers know: new with each core process."""
        self._config = config
        self._fingerprint = fingerprint
        self._hash_seed = hash_seed
        self._core: Scheduler | None = None
        self._served: WorkerDescription | None = None
        self._frontends = FrontendLinks(self)
        self._cache = CacheReporter(self._frontends.tell_cache)
        self.workers = WorkerGroups(config, self, instance=instance)
        self._leadership = Leadership(config, scheduler, self.workers, WorkerProbe(config, self._fits), self)
        self._due: set[int] = set()
        self._gathering: set[int] = set()
        """Groups with a timer that ends a wait for masks."""
        self._owners: dict[int, set[int]] = {}
        """Live keys of each frontend connection."""
        self._early = EarlyRequests(config.max_queue, config.max_queue_tokens)
        self._away: dict[int, float] = {}
        """Since when each group that has been there is not."""
        self._without_worker_since: float | None = None
        self._progressed = time.monotonic()
        """When a step was planned or gave tokens, or nothing was there to do."""
        self._broken: asyncio.Future[None] | None = None
        self._monitor = Monitor()
        self._queue_clock = QueueClock(config.max_queue_time)

    async def run(self, socket_path: str) -> None:
        """Serves until cancelled. Raises StartupError where a worker serves another model, and what `broke` tells."""
        self._broken = asyncio.get_running_loop().create_future()
        async with await self._frontends.serve(socket_path):
            await asyncio.gather(self._broken, self._tell_state(), self._leadership.run())

    def broke(self, error: Exception) -> None:
        """A bug: the state can't be trusted. The process ends; its successor gets every request again."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    @property
    def held(self) -> int:
        """Entries of all per-request maps, the core's included: 0 when nothing is live."""
        return self._early.held + sum(map(len, self._owners.values())) + (self._core.num_live if self._core else 0)

    def load(self) -> Load:
        """How busy the service is; before the first worker, who waits for one."""
        if self._core is None:
            return Load(len(self._early), {}, Counters())
        load = self._core.load()
        return replace(load, queued=load.queued + len(self._early))

    @property
    def block_size(self) -> int:
        """Tokens of a K/V block; 0 before the first worker."""
        return self._core.config.block_size if self._core is not None else 0

    @property
    def is_leading(self) -> bool:
        """Whether it dials the workers; a standby does not."""
        return self._leadership.election.dials

    def check_invariants(self) -> None:
        """Asserts that the core's state is consistent. O(everything)."""
        self._running_core.check_invariants()

    # Frontends.

    def state(self) -> core_pb2.CoreState:
        """What frontends need to know."""
        election = self._leadership.election
        state = core_pb2.CoreState(active=election.serves, standby=not election.accepts)
        state.peer.CopyFrom(claim_to_pb(election.claim))
        state.active_endpoint = election.leader()
        state.progressing = not self.held or time.monotonic() - self._progressed < self._config.step_timeout
        load = self.load()
        state.queued = load.queued
        state.running = sum(group.running for group in load.groups.values())
        for link in self.workers.links.values():
            group = load.groups.get(link.group, GroupLoad())
            values = {name: getattr(group, name) for name in GroupLoad.__dataclass_fields__}
            state.groups.add(
                endpoint=link.endpoint,
                connected=link.is_connected,
                refused=link.is_refused,
                problem=link.problem,
                **values,
            )
        if self._core is None or self._served is None:
            return state
        fitting = sum(not link.is_refused for link in self.workers.links.values())
        state.max_running = self._core.config.max_num_seqs * fitting
        state.model.dtype = self._served.dtype
        state.model.context_limit = self._core.context_limit
        state.model.vocabulary_size = self._served.vocabulary_size
        state.model.eos_token_ids.extend(self._served.eos_token_ids)
        state.model.block_size = self._served.block_size
        return state

    def submit(self, request: Request) -> None:
        """Raises a TandemError to refuse it. Before this scheduler leads it waits: after a restart of this process the
        frontends come back sooner than the workers."""
        election, now = self._leadership.election, time.monotonic()
        if not election.accepts:
            raise Unavailable(STANDBY)
        try:
            if self._core is None or election.role is not Role.LEADING:
                self._early.add(request)
            else:
                self._core.submit(request)
        except QueueFull as error:
            error.retry_after_ms = self._queue_clock.retry_after_ms(now)
            raise
        # Who goes on with an output has had its turn.
        self._queue_clock.submitted(request.key, now, waits=not request.output.size)
        self._owners.setdefault(peer_of(request.key), set()).add(request.key)
        self._settle()

    def _end_late(self) -> None:
        """Who has waited for too long is told so, and never planned."""
        now = time.monotonic()
        for key in self._queue_clock.late(now):
            problem = f"no turn within {self._config.max_queue_time:g} s: try again later"
            error = QueueFull(problem, self._queue_clock.retry_after_ms(now))
            if key in self._early:
                self._end_early(key, error)
            elif self._core is not None:
                self._core.expire(key, error)

    def _end_early(self, key: int, error: TandemError) -> None:
        self._early.drop(key)
        self._forget(key)
        self._frontends.end(key, error)

    def _settle(self) -> None:
        """What a verb of the core brings about beyond its answer: ends of sequences, rows to plan."""
        if self._core is not None:
            self._deliver(self._core.take_outputs())
            self._wake_all()

    def cancel(self, key: int) -> None:
        """The frontend expects no answer."""
        self._early.drop(key)
        self._forget(key)
        if self._core is not None and self._core.abort(key):
            self._wake_all()

    def abort_by_id(self, request_id: str) -> bool:
        """Ends its sequences on whatever frontends they are."""
        keys = self._early.keys_of(request_id)
        keys += self._core.keys_of(request_id) if self._core is not None else []
        for key in keys:
            self.cancel(key)
            self._frontends.end(key, Aborted(f"request {request_id!r} was aborted by its id"))
        return bool(keys)

    def mask_ready(self, key: int, position: int, allowed: bytes) -> None:
        """A constrained sequence may go on."""
        if key in self._early:
            self._early.mask_ready(key, position, allowed)
        elif self._core is not None:
            self._core.mask_ready(key, position, allowed)
            self._wake_all()

    def watch_cache(self, peer: int, watch: bool) -> None:
        """A frontend begins or ends following what is cached."""
        self._cache.watch(peer, watch)

    def flush_cache(self) -> bool:
        """Forgets what is cached; False while a request is live."""
        flushed = not self.held and (self._core is None or self._core.flush_cache())
        self._cache.tell()
        return flushed

    def request_ended(self, request: RequestStats) -> None:
        """For the statistics."""
        self._monitor.request_ended(request)

    def stats(self, max_requests: int) -> GetStatsResponse:
        """What the service has done."""
        return self._monitor.stats(max_requests, self.load().counters)

    def left(self, peer: int) -> None:
        """Ends what nobody reads any more."""
        self._cache.watch(peer, False)
        for key in list(self._owners.get(peer, ())):
            self.cancel(key)

    def led_before(self, term: int) -> None:
        """This scheduler led when the core process before this one died."""
        self._leadership.led_before(term)

    async def _tell_state(self) -> None:
        while True:
            await asyncio.sleep(STATE_INTERVAL_S)
            if not self.held:
                self._progressed = time.monotonic()
            self._frontends.broadcast(self.state())
            self._end_without_worker()
            self._end_late()
            if self._core is not None:
                self._deliver(self._core.take_outputs())

    # Workers.

    def described(self, group: int, description: WorkerDescription) -> None:
        """The first group's answer fixes the core's configuration; the others must fit it.

        Raises Misfit where this group can't serve, StartupError where it is the only one that there will ever be.
        """
        endpoint = self.workers.links[group].endpoint
        if (twin := self.workers.twin(group, description)) is not None:
            raise Misfit(f"is the same worker as {twin.endpoint}: name it once in --workers")
        if problem := foreign(description, self._config, self._fingerprint):
            alone = len(self._config.workers) == 1 and not is_name(self._config.workers[0])
            raise StartupError(f"worker {endpoint} {problem}") if alone and self._core is None else Misfit(problem)
        if self._core is None or self._served is None:
            self._core = Scheduler(core_config(self._config, description, self._hash_seed))
            self._served = description
            self._cache.attach(self._core.cache_watch)
        elif problem := misfit(description, self._core.config, self._served):
            if not self._core.load().groups:
                self.broke(Outgrown(f"none is left of the workers that served; {endpoint} {problem}"))
            raise Misfit(problem)

    def _fits(self, description: WorkerDescription) -> bool:
        """Whether this scheduler could use such a worker."""
        return not description.draining and not foreign(description, self._config, self._fingerprint)

    @property
    def _running_core(self) -> Scheduler:
        assert self._core is not None, "a group opens only after it was described"
        return self._core

    def opened(self, group: int, description: WorkerDescription) -> StepPlan:
        """Opens the group's next epoch with an empty cache and a plan without rows: a refusal then costs nothing."""
        self._running_core.worker_ready(group, description.num_blocks)
        self._settle()
        return self._running_core.heartbeat(group)

    def connected(self, group: int) -> None:
        """The group holds the lease: it may get rows."""
        self._away.pop(group, None)
        self._leadership.workers_changed()
        self._frontends.broadcast(self.state())
        self._wake_all()

    def heartbeat(self, group: int) -> StepPlan:
        """A plan without rows, the next in the log."""
        return self._running_core.heartbeat(group)

    def result(self, group: int, result: StepResult) -> None:
        """Plans the next step before the tokens are packed for the frontends: the worker must not wait."""
        outputs = self._running_core.update(group, result)
        if len(outputs.keys):
            self._progressed = time.monotonic()
        self._plan(group)
        self._deliver(outputs)
        self._deliver(self._running_core.take_outputs())
        if result.draining:
            self._wake_all()  # others may have room for what runs there
            if not self._running_core.load().groups[group].running:
                self.workers.links[group].close()

    def lost(self, group: int) -> None:
        """Its sequences go back to the queue: to other groups at once, or to wait for its return."""
        self._away.setdefault(group, time.monotonic())
        link = self.workers.links[group]
        if link.is_drained and not self.workers.any_connected:
            _log.warning("the last worker is drained: requests wait for another one", endpoint=link.endpoint)
        self._deliver(self._running_core.worker_lost(group))
        self._leadership.workers_changed()
        self._cache.tell()
        self._frontends.broadcast(self.state())
        self._wake_all()

    def _end_without_worker(self) -> None:
        """After the worker loss timeout, whoever waits is told; also where none has come yet, and who waits for one
        group alone."""
        now = time.monotonic()
        if self.workers.any_connected or not self._leadership.election.dials:
            self._without_worker_since = None
            self._forget_away(now)
        elif self._without_worker_since is None:
            self._without_worker_since = now
        elif now - self._without_worker_since > self._config.worker_loss_timeout:
            waited = f"{self._config.worker_loss_timeout:g} s"
            self._end_all(Unavailable(f"no worker for {waited}: the scheduler's log says why; try again later"))

    def _end_all(self, error: TandemError) -> None:
        for key in self._early.all_keys():
            self._end_early(key, error)
        if self._core is not None:
            self._deliver(self._core.end_all(error))

    def _forget_away(self, now: float) -> None:
        timeout = self._config.worker_loss_timeout
        for group in [group for group, since in self._away.items() if now - since > timeout]:
            del self._away[group]
            error = Unavailable(f"the worker that could hold this request has been away for {timeout:g} s")
            self._deliver(self._running_core.forget_group(group, error))

    # Leadership.

    def leads(self) -> None:
        """Who waited goes to the core. What fits no pool can be told now. Groups that another scheduler had meanwhile
        have not been away."""
        self._away = dict.fromkeys(self._away, time.monotonic())
        for key, error in self._early.hand_over(self._running_core):
            self._end_early(key, error)
        self._settle()

    def stands_by(self) -> None:
        """Clients resume where the workers are."""
        self._end_all(Unavailable(STANDBY))

    def claim_changed(self) -> None:
        """Peers and clients are told at once."""
        self._frontends.broadcast(self.state())

    # Planning.

    def _wake_all(self) -> None:
        for group in self.workers.links:
            self._wake(group)

    def _wake(self, group: int) -> None:
        """Plans once after this turn of the loop, however many events it brought."""
        if group not in self._due:
            self._due.add(group)
            asyncio.get_running_loop().call_soon(self._plan_woken, group)

    def _plan_woken(self, group: int, patient: bool = True) -> None:
        """The loop would log an exception of a callback and go on, without ever planning again."""
        try:
            self._plan(group, patient)
            if self._core is not None:
                self._deliver(self._core.take_outputs())
        except Exception as error:
            self.broke(error)

    def _plan(self, group: int, patient: bool = True) -> None:
        self._due.discard(group)
        self._end_late()
        link = self.workers.links.get(group)
        if link is None:
            return
        depth = self._config.depth or link.depth
        while link.is_connected and len(link.outstanding) < depth:
            plan = self._running_core.schedule(group, patient=patient)
            if plan is None:
                if self._running_core.is_gathering(group) and not link.outstanding:
                    self._end_gathering_later(group)
                break
            self._progressed = time.monotonic()
            link.send(plan)
        self._cache.tell()

    def _end_gathering_later(self, group: int) -> None:
        if group not in self._gathering:
            self._gathering.add(group)
            asyncio.get_running_loop().call_later(MASK_PATIENCE_S, self._end_gathering, group)

    def _end_gathering(self, group: int) -> None:
        self._gathering.discard(group)
        if group in self.workers.links:
            self._plan_woken(group, patient=bool(self.workers.links[group].outstanding))

    def _deliver(self, outputs: StepOutputs) -> None:
        """What a plan started or put back is told at once, not with its result: frontends take the times."""
        if outputs.is_empty:
            return
        for ended in outputs.ended:
            self._forget(ended.key)
        self._frontends.deliver(outputs)

    def _forget(self, key: int) -> None:
        peer = peer_of(key)
        keys = self._owners.get(peer, set())
        if key in keys:
            keys.remove(key)
            self._queue_clock.ended(time.monotonic())
        if not keys:
            self._owners.pop(peer, None)
