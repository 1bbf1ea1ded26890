"""A worker before a scheduler that may send anything: what is no plan is refused, and the next epoch is sound."""

import numpy as np
from google.protobuf.message import DecodeError

from shared.errors import InvalidRequest
from shared.pb import worker_pb2
from shared.wire import plan_to_pb
from tandem.models import model_folder
from tests.fuzz.samples import DECODE_PLAN, FIRST_PLAN
from tests.worker.planner import make_runner
from worker_svc.parallel import TensorParallel
from worker_svc.progress import Progress
from worker_svc.runner.group import GroupRunner

_FIRST, _DECODE = (plan_to_pb(plan, 1) for plan in (FIRST_PLAN, DECODE_PLAN))


class WorkerEdge:
    """A rank with the tiny model."""

    def __init__(self) -> None:
        runner = make_runner(model_folder("tiny"), num_kv_blocks=8, max_num_seqs=4, block_size=16)
        self._group = GroupRunner(runner, TensorParallel(), Progress(np.zeros((1, 3)), 0))
        self._expected = self._sound()

    def take(self, plans: list[bytes]) -> None:
        """Of one epoch, after a sound beginning. Raises what is not refused by its name."""
        self._sound()
        try:
            for data in plans:
                self._group.step(worker_pb2.StepPlan.FromString(data))()
        except (DecodeError, InvalidRequest):
            pass
        assert self._sound() == self._expected

    def _sound(self) -> list[int]:
        """The tokens of a new epoch."""
        self._group.open_epoch()
        return [int(self._group.step(plan)().token_ids[0]) for plan in (_FIRST, _DECODE)]
