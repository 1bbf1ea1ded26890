"""One rank of an exchange on a CPU: `python -m tests.kernels.exchange_rank RANK RANKS FOLDER`, in the interpreter.

Inboxes are files that all ranks map; what each exchange gave goes into a file of the rank's own.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

CAPACITY = 2048
CASES = [
    ("reduce", torch.bfloat16, 2 * CAPACITY),
    ("gather", torch.int64, 3),
    ("reduce", torch.float32, 700),
    ("reduce", torch.bfloat16, 34),
    ("gather", torch.int64, CAPACITY // 2),
    ("reduce", torch.bfloat16, 1026),
    ("gather", torch.float32, 513),
] * 2


def values_of(rank: int, case: int) -> Tensor:
    """What a rank brings to an exchange."""
    _, dtype, size = CASES[case]
    generator = torch.Generator().manual_seed(100 * case + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
    return torch.randn(size, generator=generator).to(dtype)


def main() -> None:
    """All cases, one after another."""
    from worker_svc.kernels.exchange import BLOCK, Inboxes, all_gather, all_reduce

    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    size = 2 * ranks * CAPACITY
    maps = [
        torch.from_file(str(folder / f"inbox{owner}"), shared=True, size=size, dtype=torch.int64)
        for owner in range(ranks)
    ]
    counts = torch.zeros(CAPACITY // BLOCK, dtype=torch.int32)
    inboxes = Inboxes(rank, tuple(inbox.data_ptr() for inbox in maps), CAPACITY, counts)
    results = []
    for case, (kind, _, _) in enumerate(CASES):
        values = values_of(rank, case)
        if kind == "reduce":
            all_reduce(values, inboxes)
        else:
            out = torch.full((ranks, len(values)), -77, dtype=values.dtype)
            all_gather(values, inboxes, out=out)
            values = out
        results.append(values)
    torch.save(results, folder / f"results{rank}")


if __name__ == "__main__":
    main()
