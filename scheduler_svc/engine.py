"""The core process's one loop: carries messages between frontends, the pure core and the worker groups.

Every event is applied to the core at once; plans are made in a callback that runs after the events of one turn of the
loop, so that all of them are taken before the next schedule(). Decides nothing about sequences: the core does.
"""

import asyncio
import time

from scheduler_svc.cache_news import CacheReporter
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core import RETRY_AFTER_MS, Counters, GroupLoad, Load, Request, Scheduler, StepOutputs
from scheduler_svc.fitting import core_config, foreign, smaller
from scheduler_svc.frontend_links import FrontendLinks, peer_of
from scheduler_svc.monitor import Monitor
from scheduler_svc.worker_client import WorkerLink
from shared.dialer import Dialer
from shared.errors import Aborted, QueueFull, StartupError, TandemError, Unavailable
from shared.pb import core_pb2
from shared.pb.generation_pb2 import GetStatsResponse, RequestStats
from shared.types import StepPlan, StepResult, WorkerDescription

STATE_INTERVAL_S = 0.5
MASK_PATIENCE_S = 0.002
"""How long constrained sequences wait for each other's masks while their worker idles: one whose grammar is slow must
not hold up the others."""


class Engine:
    """Wires one core, its worker groups and its frontends. Implements WorkerListener and FrontendListener."""

    def __init__(self, config: SchedulerConfig, fingerprint: str, *, instance: int, hash_seed: int) -> None:
        self._config = config
        self._fingerprint = fingerprint
        self._hash_seed = hash_seed
        self._core: Scheduler | None = None
        self._served: WorkerDescription | None = None
        self._frontends = FrontendLinks(self)
        self._cache = CacheReporter(self._frontends.tell_cache)
        dialer = Dialer(config.worker_security)
        self.links = [
            WorkerLink(group, endpoint, self, dialer, instance=instance, step_timeout=config.step_timeout)
            for group, endpoint in enumerate(config.workers)
        ]
        self._due: set[int] = set()
        self._gathering: set[int] = set()
        """Groups with a timer that ends a wait for masks."""
        self._owners: dict[int, set[int]] = {}
        """Live keys of each frontend connection."""
        self._early: dict[int, Request] = {}
        """Requests that came before the first worker, by key."""
        self._early_masks: dict[int, tuple[int, bytes]] = {}
        """What mask_ready said of them, by key."""
        self._without_worker_since: float | None = None
        self._progressed = time.monotonic()
        """When a step was planned or gave tokens, or nothing was there to do."""
        self._broken: asyncio.Future[None] | None = None
        self._monitor = Monitor()

    async def run(self, socket_path: str) -> None:
        """Serves until cancelled. Raises StartupError where a worker serves another model, and what `broke` tells."""
        self._broken = asyncio.get_running_loop().create_future()
        async with await self._frontends.serve(socket_path):
            await asyncio.gather(self._broken, self._tell_state(), *(link.run() for link in self.links))

    def broke(self, error: Exception) -> None:
        """A bug: the state can't be trusted. The process ends; its successor gets every request again."""
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    @property
    def held(self) -> int:
        """Entries of all per-request maps, the core's included: 0 when nothing is live."""
        early = len(self._early) + len(self._early_masks)
        return early + sum(map(len, self._owners.values())) + (self._core.num_live if self._core else 0)

    def load(self) -> Load:
        """How busy the service is; before the first worker, who waits for one."""
        if self._core is None:
            return Load(len(self._early), (GroupLoad(),) * len(self.links), Counters())
        return self._core.load()

    @property
    def block_size(self) -> int:
        """Tokens of a K/V block; 0 before the first worker."""
        return self._core.config.block_size if self._core is not None else 0

    def check_invariants(self) -> None:
        """Asserts that the core's state is consistent. O(everything)."""
        self._running_core.check_invariants()

    # Frontends.

    def state(self) -> core_pb2.CoreState:
        """What frontends need to know."""
        state = core_pb2.CoreState(active=any(link.is_connected for link in self.links))
        state.progressing = not self.held or time.monotonic() - self._progressed < self._config.step_timeout
        if self._core is None or self._served is None:
            return state
        load = self._core.load()
        state.queued = load.queued
        for link, group in zip(self.links, load.groups, strict=True):
            state.groups.add(
                endpoint=link.endpoint,
                connected=link.is_connected,
                running=group.running,
                total_blocks=group.total_blocks,
                free_blocks=group.free_blocks,
            )
        state.running = sum(group.running for group in load.groups)
        state.max_running = self._core.config.max_num_seqs * len(self.links)
        state.model.dtype = self._served.dtype
        state.model.context_limit = self._core.context_limit
        state.model.vocabulary_size = self._served.vocabulary_size
        state.model.eos_token_ids.extend(self._served.eos_token_ids)
        state.model.block_size = self._served.block_size
        return state

    def submit(self, request: Request) -> None:
        """Raises a TandemError to refuse it. Before the first worker it waits: after a restart of this process the
        frontends come back sooner than the workers."""
        if self._core is None:
            if len(self._early) >= self._config.max_queue and not request.again:
                raise QueueFull(f"{len(self._early)} requests wait for a worker: try again later", RETRY_AFTER_MS)
            self._early[request.key] = request
        else:
            self._core.submit(request)
        self._owners.setdefault(peer_of(request.key), set()).add(request.key)
        self._settle()

    def _submit_early(self, core: Scheduler) -> None:
        for key, request in list(self._early.items()):
            try:
                core.submit(request)
                if key in self._early_masks:
                    core.mask_ready(key, *self._early_masks[key])
            except TandemError as error:
                self._end_early(key, error)
        self._early.clear()
        self._early_masks.clear()
        self._settle()

    def _end_early(self, key: int, error: TandemError) -> None:
        del self._early[key]
        self._early_masks.pop(key, None)
        self._forget(key)
        self._frontends.end(key, error)

    def _settle(self) -> None:
        """What submit and worker_ready bring about beyond their answer: ends of sequences, rows to plan."""
        if self._core is not None:
            self._deliver(self._core.take_outputs())
            self._wake_all()

    def cancel(self, key: int) -> None:
        """The frontend expects no answer."""
        self._early.pop(key, None)
        self._early_masks.pop(key, None)
        self._forget(key)
        if self._core is not None and self._core.abort(key):
            self._wake_all()

    def abort_by_id(self, request_id: str) -> bool:
        """Ends its sequences on whatever frontends they are."""
        keys = [key for key, request in self._early.items() if request.request_id == request_id]
        keys += self._core.keys_of(request_id) if self._core is not None else []
        for key in keys:
            self.cancel(key)
            self._frontends.end(key, Aborted(f"request {request_id!r} was aborted by its id"))
        return bool(keys)

    def mask_ready(self, key: int, position: int, allowed: bytes) -> None:
        """A constrained sequence may go on."""
        if self._core is not None:
            self._core.mask_ready(key, position, allowed)
            self._wake_all()
        elif key in self._early:
            self._early_masks[key] = (position, allowed)

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

    async def _tell_state(self) -> None:
        while True:
            await asyncio.sleep(STATE_INTERVAL_S)
            if not self.held:
                self._progressed = time.monotonic()
            self._frontends.broadcast(self.state())
            self._end_without_worker()

    # Workers.

    def described(self, group: int, description: WorkerDescription) -> None:
        """The first group's answer fixes the core's configuration; the others must fit it.

        Raises StartupError where nothing can be served, ValueError where only this group can't serve.
        """
        problem = foreign(description, self._config, self._fingerprint)
        if self._core is not None:
            if problem := problem or smaller(description, self._core.config):
                raise ValueError(problem)
            return
        if problem:
            raise StartupError(f"worker {self.links[group].endpoint} {problem}")
        self._core = Scheduler(core_config(self._config, description, self._hash_seed))
        self._served = description
        self._cache.attach(self._core.cache_watch)
        self._submit_early(self._core)

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
        self._frontends.broadcast(self.state())
        self._wake(group)

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
        if result.draining and not self._running_core.load().groups[group].running:
            self.links[group].close()

    def lost(self, group: int) -> None:
        """Its sequences go back to the queue: to other groups at once, or to wait for its return."""
        self._deliver(self._running_core.worker_lost(group))
        self._cache.tell()
        self._frontends.broadcast(self.state())
        self._wake_all()

    def _end_without_worker(self) -> None:
        """After the worker loss timeout, whoever waits is told; also where none has come yet."""
        now = time.monotonic()
        if any(link.is_connected for link in self.links):
            self._without_worker_since = None
        elif self._without_worker_since is None:
            self._without_worker_since = now
        elif now - self._without_worker_since > self._config.worker_loss_timeout:
            error = Unavailable(f"no worker for {self._config.worker_loss_timeout:g} s: try again later")
            for key in list(self._early):
                self._end_early(key, error)
            if self._core is not None:
                self._deliver(self._core.end_all(error))

    # Planning.

    def _wake_all(self) -> None:
        for link in self.links:
            self._wake(link.group)

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
        link = self.links[group]
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
        self._plan_woken(group, patient=bool(self.links[group].outstanding))

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
        keys.discard(key)
        if not keys:
            self._owners.pop(peer, None)
