"""The pure core, once it is there: what the first worker tells of itself fixes the core's configuration.

Owns who may serve beside whom. Knows no link and no request.
"""

from collections.abc import Callable

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core import CacheWatch, Scheduler
from scheduler_svc.fitting import core_config, foreign, misfit
from scheduler_svc.worker_client import Misfit
from shared.errors import StartupError, TandemError
from shared.resolve import is_name
from shared.types import WorkerDescription


class Outgrown(TandemError):
    """Only a worker is left that needs another core than this one: the process ends, and its successor takes it."""


class ServedCore:
    """None at first."""

    def __init__(
        self,
        config: SchedulerConfig,
        fingerprint: str,
        hash_seed: int,
        begins: Callable[[CacheWatch], None],
        broke: Callable[[Exception], None],
    ) -> None:
        """`begins` is told of the core's cache when it is there, `broke` what this process has to end for."""
        self.core: Scheduler | None = None
        self.worker: WorkerDescription | None = None
        """The first one, which the core was made for."""
        self._config = config
        self._fingerprint = fingerprint
        self._hash_seed = hash_seed
        self._begins = begins
        self._broke = broke

    @property
    def running(self) -> Scheduler:
        """The core, where it must be there."""
        assert self.core is not None, "a group opens only after it was described"
        return self.core

    def fits(self, worker: WorkerDescription) -> bool:
        """Whether this scheduler could use such a worker."""
        return not worker.draining and not foreign(worker, self._config, self._fingerprint)

    def admit(self, endpoint: str, worker: WorkerDescription) -> None:
        """The first group's answer fixes the core's configuration; the others must fit it.

        Raises Misfit where this group can't serve, StartupError where it is the only one that there will ever be.
        """
        if problem := foreign(worker, self._config, self._fingerprint):
            alone = len(self._config.workers) == 1 and not is_name(self._config.workers[0])
            raise StartupError(f"worker {endpoint} {problem}") if alone and self.core is None else Misfit(problem)
        if self.core is None or self.worker is None:
            self.core = Scheduler(core_config(self._config, worker, self._hash_seed))
            self.worker = worker
            self._begins(self.core.cache_watch)
        elif problem := misfit(worker, self.core.config, self.worker):
            if not self.core.load().groups:
                self._broke(Outgrown(f"none is left of the workers that served; {endpoint} {problem}"))
            raise Misfit(problem)
