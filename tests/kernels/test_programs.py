"""Whatever steps come, what they launch has run before the worker is ready: to compile it takes long."""

from typing import Any

import pytest

from worker_svc.runner.batch import Limits
from worker_svc.runner.programs import Programs


class Kernels:
    """Records what is launched."""

    def __init__(self) -> None:
        self.launched: set[tuple[Any, ...]] = set()

    def decode(self, rows: int) -> None:
        self.launched.add(("decode", rows))

    def mixed(self, tokens: int, rows: int) -> None:
        self.launched.add(("mixed", tokens, rows))

    def sample(self, rows: int, narrow: bool) -> None:
        self.launched.add(("sample", rows, narrow))


@pytest.mark.parametrize("seqs", [1, 37])
def test_without_graphs_every_step_has_run_before_the_first(seqs: int) -> None:
    kernels = Kernels()
    programs = Programs(kernels, Limits(seqs, 130, 64, 16, 8, 300), mixed=True)  # type: ignore[arg-type]
    programs.run_all(report=False)
    ready = set(kernels.launched)
    for rows in range(1, seqs + 1):
        for narrow in (False, True):
            programs.decode(programs.decode_size(rows), narrow=narrow)
            for tokens in range(rows, 131):
                bucket = programs.mixed_size(tokens, rows)
                programs.mixed(bucket)
                programs.sample(bucket[1], narrow=narrow)
    assert kernels.launched == ready
