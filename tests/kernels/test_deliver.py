"""What a step sampled lands in the next place of the ring, and nowhere else."""

import pytest
import torch

from tests.kernels import COMPILED, ints
from worker_svc.kernels.deliver import Ring, deliver

PLACES, ROWS = 4, 300


@pytest.mark.parametrize("rows", [1, 129, ROWS])
@pytest.mark.parametrize("turn", [0, 2, 2**31 - 2], ids=["first", "later", "wrapping"])
def test_steps_take_the_places_in_turn(rows: int, turn: int) -> None:
    memory = torch.full((PLACES, 2, ROWS), -77, dtype=torch.int32, pin_memory=COMPILED)
    ring = Ring(memory, ints([turn]))
    expected = memory.clone()
    for step in range(PLACES + 1):
        sampled = ints([[10_000 * step + row for row in range(ROWS)], [row % 2 for row in range(ROWS)]])
        deliver(sampled, rows, ring)
        expected[(turn + step) % PLACES, :, :rows] = sampled[:, :rows].cpu()
    if COMPILED:
        torch.cuda.synchronize()
    assert torch.equal(memory, expected)
