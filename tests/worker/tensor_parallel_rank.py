"""One rank of a real group: `python -m tests.worker.tensor_parallel_rank RANK SIZE RENDEZVOUS SPEC...`.

A spec is a JSON object: the folder of a model as `model`, and settings. Prints as JSON what it sampled, a list of
tokens per sequence and spec, and what messages it had from rank 0.
"""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shared.logit_rules import LogitRules
from shared.logprobs import entry_bytes, read_entry
from shared.types import RowSampling
from tests.worker.planner import GREEDY, Planner, make_runner
from worker_svc.parallel import TensorParallel, join

SAMPLINGS = (
    GREEDY,
    RowSampling(temperature=1.2, seed=3),
    RowSampling(temperature=1.4, top_k=30, top_p=0.97, min_p=0.01, seed=4, min_tokens=5, suppressed_ids=(0, 200)),
    RowSampling(
        temperature=1.1,
        seed=5,
        rules=LogitRules(bytes([0x77] * 42), ((1, 2), (240,)), ((5, 2.0), (245, 3.0)), 1.4, 0.5, 0.2),
        logprobs=3,
        prompt_logprobs=2,
    ),
)
LENGTHS = (5, 40, 23, 30)
COUNT = 12
"""Output tokens: every sequence goes over the end of a block."""


def outputs(model: str, group: TensorParallel, **settings: Any) -> list[list[Any]]:
    """Twelve tokens of sequences of different kinds, whose prompts are chunked beside decode rows, and logprobs."""
    planner = Planner(make_runner(Path(model), group, **settings))
    vocabulary = planner.runner.batch.limits.vocabulary_size
    for slot, sampling in enumerate(SAMPLINGS):
        allowed = sampling.rules.allowed[: -(-vocabulary // 8)]
        fitting = replace(sampling, rules=replace(sampling.rules, allowed=allowed))
        planner.admit(slot, random.Random(slot).choices(range(250), k=LENGTHS[slot]), fitting)
    while planner.sequences[1].tokens[40:][COUNT - 1 :] == []:
        planner.step([(slot, min(8, planner.remaining(slot))) for slot in range(len(SAMPLINGS))])
    tokens = [planner.sequences[slot].tokens[length:][:COUNT] for slot, length in enumerate(LENGTHS)]
    told = [
        rounded(b"".join(data)[start : start + entry_bytes(num_top)])
        for data, num_top in ((planner.logprobs, 3), (planner.prompt_logprobs, 2))
        for start in range(0, sum(map(len, data)), entry_bytes(num_top))
    ]
    return [*tokens, told]


def rounded(data: bytes) -> list[float]:
    """An entry: sums over two parts of a vocabulary differ in the last bit."""
    entry = read_entry(data)
    top = [number for token, logprob in entry.top for number in (token, round(logprob, 4))]
    return [round(entry.logprob, 4), entry.rank, *top]


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
