"""Token embedding and LM head, split over the ranks by vocabulary. The vocabulary is padded to an even split."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker_svc.layers.shard import Shard
from worker_svc.parallel import TensorParallel

_ALIGNMENT = 64  # rows per rank are a multiple of it: matrix kernels want whole tiles


class VocabParallelEmbedding(nn.Module):
    """[padded vocabulary / size, hidden]: this rank's rows; both the embedding and, tied or not, the LM head."""

    def __init__(self, vocabulary_size: int, hidden_size: int, group: TensorParallel) -> None:
        super().__init__()
        self.group = group
        self.vocabulary_size = vocabulary_size
        rows = -(-vocabulary_size // (_ALIGNMENT * group.size)) * _ALIGNMENT
        self.start = group.rank * rows
        """Token id of this rank's first row."""
        self.num_valid = min(max(vocabulary_size - self.start, 0), rows)
        """Rows of this rank that are tokens; the others are padding."""
        self.num_padding = (rows - self.num_valid) * hidden_size
        """Elements of the weight that no checkpoint fills."""
        self.weight = nn.Parameter(torch.zeros(rows, hidden_size))

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] to [T, hidden], a part of a sum over the ranks: each token's row on the rank that has it, else zeros."""
        if self.group.size == 1:
            return functional.embedding(token_ids, self.weight)
        local = token_ids - self.start
        nearest = local.clamp(0, len(self.weight) - 1)
        rows = functional.embedding(nearest, self.weight)
        return rows.masked_fill_((nearest != local)[:, None], 0)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[N, hidden] to [N, rows], `out` where it is given: logits of this rank's tokens; padding has -infinity."""
        logits = torch.mm(hidden, self.weight.t(), out=out)
        logits[:, self.num_valid :] = -torch.inf
        return logits

    def shards(self, name: str) -> Iterator[Shard]:
        """This rank's rows, padding left out."""
        shape = (self.vocabulary_size, self.weight.shape[1])
        yield Shard(f"{name}.weight", shape, self.weight[: self.num_valid], start=self.start)
