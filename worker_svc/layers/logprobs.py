"""How likely tokens are by logits that are split over the ranks by vocabulary: logprob, rank and the most likely ones.

The same on every rank. Knows nothing of sampling.
"""

import torch
from torch import Tensor

from worker_svc.layers.norm import wide
from worker_svc.parallel import TensorParallel


def token_logprobs(group: TensorParallel, logits: Tensor, start: int, token_ids: Tensor, num_top: int) -> Tensor:
    """[N, 2 + 2 * num_top] int32, the entries of shared.logprobs: floats as their bits.

    `logits` [N, tokens of this rank] are those of the tokens from `start` on; `token_ids` is [N]. No more than the
    vocabulary's tokens may be asked for.
    """
    logits = logits.to(wide(logits.dtype))
    total = group.all_gather(logits.logsumexp(-1)).logsumexp(0)
    chosen = _values_of(group, logits, start, token_ids)
    better = group.all_gather((logits > chosen[:, None]).sum(-1)).sum(0)
    entries = torch.empty(len(logits), 2 + 2 * num_top, dtype=torch.int32, device=logits.device)
    entries[:, 0] = _bits(chosen - total)
    entries[:, 1] = better + 1
    if num_top:
        top, top_ids = _most_likely(group, logits, start, num_top)
        entries[:, 2::2] = top_ids
        entries[:, 3::2] = _bits(top - total[:, None])
    return entries


def _values_of(group: TensorParallel, logits: Tensor, start: int, token_ids: Tensor) -> Tensor:
    """[N]: the logits of the tokens, from the rank that has them."""
    local = token_ids - start
    nearest = local.clamp(0, logits.shape[1] - 1)
    values = logits.gather(1, nearest[:, None])[:, 0].masked_fill(nearest != local, -torch.inf)
    return group.all_gather(values).amax(0)


def _most_likely(group: TensorParallel, logits: Tensor, start: int, count: int) -> tuple[Tensor, Tensor]:
    """Values and tokens, both [N, count], the largest first."""
    values, tokens = logits.topk(min(count, logits.shape[1]), dim=-1)
    values = group.all_gather(values).transpose(0, 1).flatten(1)  # [N, ranks * local count]
    tokens = group.all_gather(tokens + start).transpose(0, 1).flatten(1)
    values, places = values.topk(count, dim=-1)
    return values, tokens.gather(1, places)


def _bits(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.int32)
