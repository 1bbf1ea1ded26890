"""When the next step of a group is planned: after all events of one turn of the loop, as long as it takes more plans.

Owns no event and no sequence: the core says what a plan holds, the link how many may be out.
"""

import asyncio
import time
from collections.abc import Callable

from scheduler_svc.cache_news import CacheReporter
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.served_core import ServedCore
from scheduler_svc.worker_groups import WorkerGroups

MASK_PATIENCE_S = 0.002
"""How long constrained sequences wait for each other's masks while their worker idles: one whose grammar is slow must
not hold up the others."""


class Planning:
    """Of all groups."""

    def __init__(
        self,
        config: SchedulerConfig,
        served: ServedCore,
        workers: WorkerGroups,
        requests: LiveRequests,
        cache: CacheReporter,
        broke: Callable[[Exception], None],
    ) -> None:
        """`broke` is told of a bug."""
        self.progressed = time.monotonic()
        """When a step was planned or gave tokens, or nothing was there to do."""
        self._config = config
        self._served = served
        self._workers = workers
        self._requests = requests
        self._cache = cache
        self._broke = broke
        self._due: set[int] = set()
        self._gathering: set[int] = set()
        """Groups with a timer that ends a wait for masks."""

    def wake_all(self) -> None:
        """Any group may have something to do."""
        for group in self._workers.links:
            self._wake(group)

    def _wake(self, group: int) -> None:
        """Plans once after this turn of the loop, however many events it brought."""
        if group not in self._due:
            self._due.add(group)
            asyncio.get_running_loop().call_soon(self._plan_woken, group)

    def _plan_woken(self, group: int, patient: bool = True) -> None:
        """The loop would log an exception of a callback and go on, without ever planning again."""
        try:
            self.plan(group, patient)
            self._requests.deliver_rest()
        except Exception as error:
            self._broke(error)

    def plan(self, group: int, patient: bool = True) -> None:
        """Now."""
        self._due.discard(group)
        self._requests.end_late()
        link = self._workers.links.get(group)
        if link is None:
            return
        depth = self._config.depth or link.depth
        while link.is_connected and len(link.outstanding) < depth:
            plan = self._served.running.schedule(group, patient=patient)
            if plan is None:
                if self._served.running.is_gathering(group) and not link.outstanding:
                    self._end_gathering_later(group)
                break
            self.progressed = time.monotonic()
            link.send(plan)
        self._cache.tell()

    def _end_gathering_later(self, group: int) -> None:
        if group not in self._gathering:
            self._gathering.add(group)
            asyncio.get_running_loop().call_later(MASK_PATIENCE_S, self._end_gathering, group)

    def _end_gathering(self, group: int) -> None:
        self._gathering.discard(group)
        if group in self._workers.links:
            self._plan_woken(group, patient=bool(self._workers.links[group].outstanding))
