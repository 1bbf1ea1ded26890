"""The links to all worker groups: the one place that decides who is dialled, and when.

Addresses come from the command line, or from a name that is resolved again and again. Knows nothing of plans.
"""

import asyncio
import itertools
from collections.abc import Coroutine
from functools import partial

import structlog

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.worker_client import WorkerLink, WorkerListener
from shared.dialer import Dialer
from shared.resolve import follow, is_name, named
from shared.types import WorkerDescription

_log = structlog.get_logger(__name__)


class WorkerGroups:
    """Links by number. A number is never given twice: what comes late of a group that is gone hits no other one."""

    def __init__(self, config: SchedulerConfig, listener: WorkerListener, *, instance: int) -> None:
        self.links: dict[int, WorkerLink] = {}
        self._config = config
        self._listener = listener
        self._instance = instance
        self._dialer = Dialer(config.worker_security, as_child=True)
        self._numbers = itertools.count()
        self._fixed = [target for target in config.workers if not is_name(target)]
        self._found: dict[str, list[str]] = {target: [] for target in config.workers if is_name(target)}
        """Addresses by name, as last resolved."""
        self._dialers = {name: Dialer(named(config.worker_security, name), as_child=True) for name in self._found}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] | None = None
        for endpoint in self._fixed:
            self._add(endpoint, self._dialer)

    @property
    def any_connected(self) -> bool:
        """Whether any group can compute now."""
        return any(link.is_connected for link in self.links.values())

    @property
    def all_connected(self) -> bool:
        """Whether all known groups can, of which there is at least one."""
        return self.any_connected and all(link.is_connected for link in self.links.values())

    @property
    def any_held(self) -> bool:
        """Whether another scheduler has any."""
        return any(link.is_held for link in self.links.values())

    @property
    def any_answers(self) -> bool:
        """Whether any that fits has answered when it was dialled last, whoever has it."""
        return any(link.description is not None for link in self.links.values())

    def twin(self, group: int, description: WorkerDescription) -> WorkerLink | None:
        """Another group's link to the very worker that answers to this one."""
        for link in self.links.values():
            if (
                link.group != group
                and link.description is not None
                and 0 != link.description.worker == description.worker
            ):
                return link
        return None

    async def run(self) -> None:
        """Dials until cancelled, and lets go of every group then; may be called again. Raises what ends a link."""
        self._failed = asyncio.get_running_loop().create_future()
        try:
            for link in self.links.values():
                self._spawn(self._keep(link))
            for name in self._found:
                self._spawn(follow(name, self._config.resolve_interval, partial(self._resolved, name)))
            await self._failed
        finally:
            ending = list(self._tasks)
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            for link in self.links.values():
                link.is_held, link.description = False, None

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _keep(self, link: WorkerLink) -> None:
        """To the end of a group whose address is gone."""
        await link.run()
        del self.links[link.group]
        _log.info("worker is gone", endpoint=link.endpoint)

    def _resolved(self, name: str, addresses: list[str]) -> None:
        self._found[name] = addresses
        self._adjust()

    def _adjust(self) -> None:
        """New addresses are dialled; a group whose address is gone stays until its stream ends."""
        wanted = {endpoint: self._dialers[name] for name, found in self._found.items() for endpoint in found}
        wanted |= dict.fromkeys(self._fixed, self._dialer)
        for link in self.links.values():
            link.is_wanted = link.endpoint in wanted
        for endpoint in sorted(wanted.keys() - {link.endpoint for link in self.links.values()}):
            self._spawn(self._keep(self._add(endpoint, wanted[endpoint])))

    def _add(self, endpoint: str, dialer: Dialer) -> WorkerLink:
        link = WorkerLink(
            next(self._numbers),
            endpoint,
            self._listener,
            dialer,
            instance=self._instance,
            step_timeout=self._config.step_timeout,
        )
        self.links[link.group] = link
        return link
