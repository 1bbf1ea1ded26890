"""What one rank keeps of one checkpoint tensor. Layers name their shards, the loader fills them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """`target` takes [start, start + target.shape[dim]) along one dimension of the tensor `name`, all of the others."""

    name: str
    """In the checkpoint."""
    shape: tuple[int, ...]
    """Of the whole tensor in the checkpoint."""
    target: Tensor
    """A view of this rank's parameter, which it may share with other shards."""
    dim: int = 0
    start: int = 0


def whole(name: str, parameter: Tensor) -> Shard:
    """A parameter that every rank keeps in full."""
    return Shard(name, tuple(parameter.shape), parameter)


def sibling(name: str, part: str) -> str:
    """The checkpoint's name of a packed layer's part: `a.qkv_proj` and `q_proj` give `a.q_proj`."""
    parent, _, _ = name.rpartition(".")
    return f"{parent}.{part}"
