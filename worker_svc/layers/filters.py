"""top_k, top_p and min_p: which tokens of a whole distribution may be sampled. Knows nothing of ranks or noise.

All three keep a prefix of the tokens in order of likelihood (equal ones by index), so together they keep the shortest.
"""

import torch
from torch import Tensor


def filter_logits(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, most: int) -> Tensor:
    """[N, V] logits over temperature, with -infinity where a token is not kept; top_k 0, top_p 1, min_p 0 keep all.

    top_p counts the distribution renormalised over the top k and keeps the token that crosses it; min_p is relative
    to the most likely token. At least one token of a row is kept. `most` is the largest top_k, or the vocabulary's size
    where one is 0: read from the device, it would have to be waited for.
    """
    vocabulary = logits.shape[-1]
    limits = torch.where(top_k == 0, vocabulary, top_k).clamp(max=vocabulary)
    ordered = logits.topk(min(most, vocabulary), dim=-1).values  # [N, K], descending
    within = torch.arange(ordered.shape[-1], device=logits.device) < limits[:, None]
    p = ordered.masked_fill(~within, -torch.inf).softmax(-1)
    before = torch.where(top_p[:, None] < 1, p.cumsum(-1) - p, 0)  # a rounded sum must not cut where top_p is off
    kept = within & (before < top_p[:, None]) & (p >= min_p[:, None] * p[:, :1])
    counts = kept.sum(-1).clamp(min=1)
    return _keep_first(logits, ordered, counts)


def _keep_first(logits: Tensor, ordered: Tensor, counts: Tensor) -> Tensor:
    """Keeps each row's `counts` largest logits; at the boundary equal ones go by index."""
    smallest = ordered.gather(-1, counts[:, None] - 1)
    larger = logits > smallest
    equal = logits == smallest
    room = counts - larger.sum(-1)
    kept = larger | (equal & (equal.cumsum(-1) <= room[:, None]))
    return logits.masked_fill(~kept, -torch.inf)
