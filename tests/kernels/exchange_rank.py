"""One rank of an exchange on a CPU: `python -m tests.kernels.exchange_rank RANK RANKS FOLDER`, in the interpreter.

Inboxes are files that all ranks map, those named `rows` full of NOTHING; what each exchange gave goes into a file of
the rank's own.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

CAPACITY = 2048
ROWS, WIDTH = 6, 80  # most rows, values of one
EPS = 1e-6
CASES = [
    ("reduce", torch.bfloat16, 2 * CAPACITY),
    ("gather", torch.int64, 3),
    ("reduce", torch.float32, 700),
    ("reduce", torch.bfloat16, 34),
    ("gather", torch.int64, CAPACITY // 2),
    ("reduce", torch.bfloat16, 1026),
    ("gather", torch.float32, 513),
    ("rows", torch.bfloat16, ROWS * WIDTH),
    ("normed rows", torch.bfloat16, 2 * WIDTH),
    ("normed rows", torch.float32, ROWS * WIDTH),
    ("rows", torch.float32, WIDTH),
    ("narrow rows", torch.bfloat16, 4 * WIDTH // 2),
    ("normed rows", torch.bfloat16, ROWS * WIDTH),
] * 2


def values_of(rank: int, case: int) -> Tensor:
    """What a rank brings to an exchange."""
    _, dtype, size = CASES[case]
    generator = torch.Generator().manual_seed(100 * case + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**63), 2**63 - 1, (size,), generator=generator)
    values = torch.randn(size, generator=generator)
    values[::3] = -0.0  # pairs of them too: what the rows' inboxes are full of
    values[1::3][: size // 9] = -0.0
    return values.to(dtype)


def norm_weight(dtype: torch.dtype) -> Tensor:
    """Of the normed rows."""
    return torch.linspace(-2, 2, WIDTH).to(dtype)


def main() -> None:
    """All cases, one after another."""
    from worker_svc.kernels import exchange, exchange_rows

    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])

    def inboxes(name: str, capacity: int, size: int, block: int) -> exchange.Inboxes:
        files = [str(folder / f"{name}{owner}") for owner in range(ranks)]
        maps.extend(torch.from_file(file, shared=True, size=size, dtype=torch.int32) for file in files)
        addresses = tuple(words.data_ptr() for words in maps[-ranks:])
        return exchange.Inboxes(rank, addresses, capacity, torch.zeros(capacity // block, dtype=torch.int32))

    maps: list[Tensor] = []
    few = inboxes("few", CAPACITY, exchange.inbox_words(ranks, CAPACITY), exchange.BLOCK)
    place = exchange_rows.MOST_WORDS.value
    rows = inboxes("rows", ROWS * place, exchange_rows.inbox_words(ranks, ROWS * place), place)
    results, normed = [], {}
    for case, (kind, _, _) in enumerate(CASES):
        values = values_of(rank, case)
        if kind == "gather":
            out = torch.full((ranks, len(values)), -77, dtype=values.dtype)
            exchange.all_gather(values, few, out=out)
            values = out
        elif kind == "reduce":
            exchange.all_reduce(values, few)
        else:
            norm = exchange_rows.RowNorm(norm_weight(values.dtype), EPS) if kind == "normed rows" else None
            out = torch.full_like(values, torch.nan)
            width = WIDTH // 2 if kind == "narrow rows" else WIDTH
            exchange_rows.all_reduce_rows(values.view(-1, width), rows, norm, out=out.view(-1, width))
            normed[case] = out
        results.append(values)
    torch.save((results, normed), folder / f"results{rank}")


if __name__ == "__main__":
    main()
