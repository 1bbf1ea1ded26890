"""The pure scheduler core: no I/O, clock, randomness, logging or protobuf. Its callers need only these names."""

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.outputs import Counters, Ended, GroupLoad, Load, StepOutputs
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler

__all__ = ["CoreConfig", "Counters", "Ended", "GroupLoad", "Load", "Request", "Scheduler", "StepOutputs"]
