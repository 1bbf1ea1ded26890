"""The live sequences of all frontends: whose each is, who came before the core could take it, who has waited too long.

Carries them between the frontends and the pure core, and ends them. Knows no worker; decides nothing about sequences.
"""

import time

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core import Request, StepOutputs
from scheduler_svc.early import EarlyRequests
from scheduler_svc.frontend_links import FrontendLinks, peer_of
from scheduler_svc.queue_clock import QueueClock
from scheduler_svc.served_core import ServedCore
from shared.errors import Aborted, QueueFull, TandemError


class LiveRequests:
    """By key, see frontend_links."""

    def __init__(self, config: SchedulerConfig, served: ServedCore, frontends: FrontendLinks) -> None:
        self.early = EarlyRequests(config.max_queue, config.max_queue_tokens)
        self._config = config
        self._served = served
        self._frontends = frontends
        self._owners: dict[int, set[int]] = {}
        """Live keys of each frontend connection."""
        self._queue_clock = QueueClock(config.max_queue_time)

    @property
    def held(self) -> int:
        """Entries of all per-request maps, the core's included: 0 when nothing is live."""
        core = self._served.core
        return self.early.held + sum(map(len, self._owners.values())) + (core.num_live if core is not None else 0)

    def submit(self, request: Request, *, early: bool) -> None:
        """Raises a TandemError to refuse it. `early`: before this scheduler leads it waits, since after a restart of
        this process the frontends come back sooner than the workers."""
        core, now = self._served.core, time.monotonic()
        try:
            if core is None or early:
                self.early.add(request)
            else:
                core.submit(request)
        except QueueFull as error:
            error.retry_after_ms = self._queue_clock.retry_after_ms(now)
            raise
        # Who goes on with an output has had its turn.
        self._queue_clock.submitted(request.key, now, waits=not request.output.size)
        self._owners.setdefault(peer_of(request.key), set()).add(request.key)

    def hand_over(self) -> None:
        """Who waited goes to the core. What fits no pool can be told now."""
        for key, error in self.early.hand_over(self._served.running):
            self._end_early(key, error)

    def mask_ready(self, key: int, position: int, allowed: bytes) -> None:
        """A constrained sequence may go on."""
        if key in self.early:
            self.early.mask_ready(key, position, allowed)
        elif self._served.core is not None:
            self._served.core.mask_ready(key, position, allowed)

    def cancel(self, key: int) -> bool:
        """The frontend expects no answer. Whether the core had it."""
        self.early.drop(key)
        self._forget(key)
        return self._served.core is not None and self._served.core.abort(key)

    def abort_by_id(self, request_id: str) -> bool:
        """Ends its sequences on whatever frontends they are; whether there were any."""
        keys = self.early.keys_of(request_id)
        keys += self._served.core.keys_of(request_id) if self._served.core is not None else []
        for key in keys:
            self.cancel(key)
            self._frontends.end(key, Aborted(f"request {request_id!r} was aborted by its id"))
        return bool(keys)

    def left(self, peer: int) -> None:
        """Nobody reads what is the frontend's any more."""
        for key in list(self._owners.get(peer, ())):
            self.cancel(key)

    def end_late(self) -> None:
        """Who has waited for too long is told so, and never planned."""
        now = time.monotonic()
        for key in self._queue_clock.late(now):
            problem = f"no turn within {self._config.max_queue_time:g} s: try again later"
            error = QueueFull(problem, self._queue_clock.retry_after_ms(now))
            if key in self.early:
                self._end_early(key, error)
            elif self._served.core is not None:
                self._served.core.expire(key, error)

    def end_all(self, error: TandemError) -> None:
        """With the same words."""
        for key in self.early.all_keys():
            self._end_early(key, error)
        if self._served.core is not None:
            self.deliver(self._served.core.end_all(error))

    def deliver_rest(self) -> None:
        """What a verb of the core brought about beyond its answer."""
        if self._served.core is not None:
            self.deliver(self._served.core.take_outputs())

    def deliver(self, outputs: StepOutputs) -> None:
        """What a plan started or put back is told at once, not with its result: frontends take the times."""
        if outputs.is_empty:
            return
        for ended in outputs.ended:
            self._forget(ended.key)
        self._frontends.deliver(outputs)

    def _end_early(self, key: int, error: TandemError) -> None:
        self.early.drop(key)
        self._forget(key)
        self._frontends.end(key, error)

    def _forget(self, key: int) -> None:
        peer = peer_of(key)
        keys = self._owners.get(peer, set())
        if key in keys:
            keys.remove(key)
            self._queue_clock.ended(time.monotonic())
        if not keys:
            self._owners.pop(peer, None)
