"""The pure scheduler core: no I/O, clock, randomness, logging or protobuf. Its callers need only these names.

To read it: request (what lives), turns, batch, prefix, blocks and group (what a worker group holds), planner with
reservation, draft, placement and admission (how a plan comes about), results and quarantine (what comes back),
lifecycle and scheduler (the verbs), cache_watch (who follows the cache), invariants (what is always true).
"""

from scheduler_svc.core.cache_watch import CacheChanges, CacheWatch
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.outputs import Counters, Ended, GroupLoad, Load, RequeueCause, StepOutputs
from scheduler_svc.core.prefix import CacheChange, HashedBlock
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler

__all__ = [
    "CacheChange",
    "CacheChanges",
    "CacheWatch",
    "CoreConfig",
    "Counters",
    "Ended",
    "GroupLoad",
    "HashedBlock",
    "Load",
    "Request",
    "RequeueCause",
    "Scheduler",
    "StepOutputs",
]
