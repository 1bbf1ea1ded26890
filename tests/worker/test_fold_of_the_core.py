"""The worker's fold takes every plan of the real scheduler core and agrees with the core's reference worker.

Random runs: chunks, shared blocks, preemption, aborts, losses, plans ahead of results, masks.
"""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.core.random_runs import random_run
from tests.core.reference_worker import VOCABULARY_SIZE
from tests.core.simulation import GroupSide, Simulation
from worker_svc.runner.batch import BatchState, Limits
from worker_svc.step_inputs import StepInputs


class Folded(Simulation):
    """A simulation in which each group's plans are folded by BatchState too."""

    def __init__(self, *args: Any) -> None:
        self.batches: dict[int, BatchState] = {}
        self.last: dict[int, NDArray[np.int64]] = {}
        self.compared = 0
        super().__init__(*args)

    def execute(self, group: int) -> bool:
        """Folds the plan, lets the reference worker execute it, compares."""
        side = self.sides[group]
        if not side.plans:
            return False
        plan = side.plans[0]
        if plan.step_id == 1:
            self._open_fold(group)
        inputs = self.batches[group].inputs(self.batches[group].fold(plan))
        super().execute(group)
        self._compare_step(group, side, plan.rows[:, 0].tolist(), inputs)
        return True

    def _open_fold(self, group: int) -> None:
        config = self.config
        limits = Limits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_length,
            config.block_size,
            self.pools[group],
            VOCABULARY_SIZE,
        )
        self.batches[group] = BatchState(limits)
        self.last[group] = np.zeros(config.max_num_seqs, dtype=np.int64)

    def _compare_step(self, group: int, side: GroupSide, slots: list[int], inputs: StepInputs) -> None:
        tokens = inputs.token_ids
        tokens[inputs.feedback_index] = self.last[group][inputs.feedback_slots]
        size = self.config.block_size
        assert [side.worker.tokens[at // size][at % size] for at in inputs.slot_mapping.tolist()] == tokens.tolist()
        for row, slot in enumerate(slots):
            state = side.worker.slots[slot]
            assert inputs.seq_lens[row] == state.computed
            assert inputs.block_tables[row, : len(state.table)].tolist() == state.table
        sampled = side.results[-1].token_ids
        assert len(sampled) == len(inputs.sampling.slots)
        for slot, seed in zip(inputs.sampling.slots.tolist(), inputs.sampling.seeds.tolist(), strict=True):
            assert seed == side.worker.slots[slot].sampling.seed
        self.last[group][inputs.sampling.slots] = sampled
        self.compared += len(slots)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_runs(first: int) -> None:
    rows = sum(random_run(seed, kind=Folded, check=False).compared for seed in range(first, first + 50))
    assert rows > 500
