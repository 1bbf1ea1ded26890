"""A worker's settings where they are not given: what suits the device, and never less than one token for each row."""

import pytest

from worker_svc.config import WorkerConfig


@pytest.mark.parametrize(
    ("given", "on_gpu", "experts", "chosen"),
    [
        ({}, False, True, (64, 512)),
        ({}, True, False, (256, 3072)),
        ({}, True, True, (256, 4096)),
        ({"max_num_seqs": 1000}, False, False, (1000, 1000)),
        ({"max_num_batched_tokens": 10}, True, False, (10, 10)),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 100}, True, True, (8, 100)),
    ],
)
def test_batch_size(given: dict[str, int], on_gpu: bool, experts: bool, chosen: tuple[int, int]) -> None:
    assert WorkerConfig("model", **given).batch_size(on_gpu, experts) == chosen
