"""A worker's settings where they are not given: what suits the device, and never less than one token for each row."""

import pytest

from worker_svc.config import WorkerConfig


@pytest.mark.parametrize(
    ("given", "on_gpu", "chosen"),
    [
        ({}, False, (64, 512)),
        ({}, True, (256, 3072)),
        ({"max_num_seqs": 1000}, False, (1000, 1000)),
        ({"max_num_batched_tokens": 10}, True, (10, 10)),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 100}, True, (8, 100)),
    ],
)
def test_batch_size(given: dict[str, int], on_gpu: bool, chosen: tuple[int, int]) -> None:
    assert WorkerConfig("model", **given).batch_size(on_gpu) == chosen
