"""One rank of a real group: `python -m tests.worker.tensor_parallel_rank RANK SIZE RENDEZVOUS SPEC...`.

A spec is a JSON object: the folder of a model as `model`, and settings. Prints as JSON what it sampled, a list of
tokens per sequence and spec, and what messages it had from rank 0.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch

from shared.types import RowSampling
from tests.worker.planner import GREEDY, Planner, make_runner
from worker_svc.parallel import TensorParallel, join

SAMPLINGS = (
    GREEDY,
    RowSampling(temperature=1.2, seed=3),
    RowSampling(temperature=1.4, top_k=30, top_p=0.97, min_p=0.01, seed=4, min_tokens=5, suppressed_ids=(0, 200)),
)


def outputs(model: str, group: TensorParallel, **settings: Any) -> list[list[int]]:
    """Twenty tokens of three sequences of different kinds, whose prompts are chunked beside decode rows."""
    planner = Planner(make_runner(Path(model), group, **settings))
    lengths = (5, 40, 23)
    for slot, sampling in enumerate(SAMPLINGS):
        planner.admit(slot, random.Random(slot).choices(range(250), k=lengths[slot]), sampling)
    while planner.sequences[1].tokens[40:][19:] == []:
        planner.step([(slot, min(8, planner.remaining(slot))) for slot in range(3)])
    return [planner.sequences[slot].tokens[lengths[slot] :][:20] for slot in range(3)]


def messages(group: TensorParallel) -> list[bytes]:
    """Of sizes around the first part of a message and far beyond, from rank 0 to all."""
    sent = [random.Random(size).randbytes(size) for size in (0, 1, 4087, 4088, 4089, 4096, 100_000)]
    if group.rank:
        return [group.receive_bytes() for _ in sent]
    for message in sent:
        group.send_bytes(message)
    return sent


def main() -> None:
    """Runs the specs one after another in one group."""
    rank, size, rendezvous, *specs = sys.argv[1:]
    group = join(int(rank), int(size), Path(rendezvous), torch.device("cpu"))
    sampled = [outputs(group=group, **json.loads(spec)) for spec in specs]
    print(json.dumps({"sampled": sampled, "messages": [message.hex() for message in messages(group)]}))
    group.leave()


if __name__ == "__main__":
    main()
