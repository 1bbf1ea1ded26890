"""What happens to worker groups, taken to the core: they come, answer, are lost, and stay away for too long.

Decides nothing about sequences: the core does. Knows no frontend and no election.
"""

import time
from collections.abc import Callable

import structlog

from scheduler_svc.cache_news import CacheReporter
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.planning import Planning
from scheduler_svc.served_core import ServedCore
from scheduler_svc.worker_client import Misfit
from scheduler_svc.worker_groups import WorkerGroups
from shared.errors import Unavailable
from shared.types import StepPlan, StepResult, WorkerDescription

_log = structlog.get_logger(__name__)


class WorkerEvents:
    """The listener of all groups. Each call is short and never awaits."""

    def __init__(
        self,
        config: SchedulerConfig,
        served: ServedCore,
        requests: LiveRequests,
        cache: CacheReporter,
        *,
        instance: int,
        changed: Callable[[], None],
        broke: Callable[[Exception], None],
    ) -> None:
        """`changed` is called when a group has come or is lost, `broke` is told of a bug."""
        self.groups = WorkerGroups(config, self, instance=instance)
        self.planning = Planning(config, served, self.groups, requests, cache, broke)
        self._config = config
        self._served = served
        self._requests = requests
        self._cache = cache
        self._changed = changed
        self._away: dict[int, float] = {}
        """Since when each group that has been there is not."""
        self._without_worker_since: float | None = None

    def described(self, group: int, description: WorkerDescription) -> None:
        """Raises Misfit where this group can't serve, StartupError where it is the only one that there will ever be."""
        if (twin := self.groups.twin(group, description)) is not None:
            raise Misfit(f"is the same worker as {twin.endpoint}: name it once in --workers")
        self._served.admit(self.groups.links[group].endpoint, description)

    def opened(self, group: int, description: WorkerDescription) -> StepPlan:
        """Opens the group's next epoch with an empty cache and a plan without rows: a refusal then costs nothing."""
        self._served.running.worker_ready(group, description.num_blocks)
        self._requests.deliver_rest()
        self.planning.wake_all()
        return self._served.running.heartbeat(group)

    def connected(self, group: int) -> None:
        """The group holds the lease: it may get rows."""
        self._away.pop(group, None)
        self._changed()
        self.planning.wake_all()

    def heartbeat(self, group: int) -> StepPlan:
        """A plan without rows, the next in the log."""
        return self._served.running.heartbeat(group)

    def result(self, group: int, result: StepResult) -> None:
        """Plans the next step before the tokens are packed for the frontends: the worker must not wait."""
        outputs = self._served.running.update(group, result)
        if len(outputs.keys):
            self.planning.progressed = time.monotonic()
        self.planning.plan(group)
        self._requests.deliver(outputs)
        self._requests.deliver_rest()
        if result.draining:
            self.planning.wake_all()  # others may have room for what runs there
            if not self._served.running.load().groups[group].running:
                self.groups.links[group].close()

    def lost(self, group: int) -> None:
        """Its sequences go back to the queue: to other groups at once, or to wait for its return."""
        self._away.setdefault(group, time.monotonic())
        link = self.groups.links[group]
        if link.is_drained and not self.groups.any_connected:
            _log.warning("the last worker is drained: requests wait for another one", endpoint=link.endpoint)
        self._requests.deliver(self._served.running.worker_lost(group))
        self._cache.tell()
        self._changed()
        self.planning.wake_all()

    def lead(self) -> None:
        """Groups that another scheduler had meanwhile have not been away."""
        self._away = dict.fromkeys(self._away, time.monotonic())

    def end_without_worker(self, *, dials: bool) -> None:
        """After the worker loss timeout, whoever waits is told; also where none has come yet, and who waits for one
        group alone. `dials`: else nobody waits here."""
        now, timeout = time.monotonic(), self._config.worker_loss_timeout
        if self.groups.any_connected or not dials:
            self._without_worker_since = None
            self._forget_away(now, timeout)
        elif self._without_worker_since is None:
            self._without_worker_since = now
        elif now - self._without_worker_since > timeout:
            problem = f"no worker for {timeout:g} s: the scheduler's log says why; try again later"
            self._requests.end_all(Unavailable(problem))

    def _forget_away(self, now: float, timeout: float) -> None:
        for group in [group for group, since in self._away.items() if now - since > timeout]:
            del self._away[group]
            error = Unavailable(f"the worker that could hold this request has been away for {timeout:g} s")
            self._requests.deliver(self._served.running.forget_group(group, error))
