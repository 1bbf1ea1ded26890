"""Rotary position embedding (Su et al. 2021): tables of cosines and sines, and the rotation."""

import math

import torch
from torch import Tensor, nn

from shared.model_config import RopeConfig
from worker_svc.layers.norm import wide


class RotaryEmbedding(nn.Module):
    """cos and sin, [positions, head_dim / 2] each: computed in float64, kept in the wide format of `dtype`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        frequencies, factor = _frequencies(rope, head_dim)
        angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", (angles.cos() * factor).to(wide(dtype)), persistent=False)
        self.register_buffer("sin", (angles.sin() * factor).to(wide(dtype)), persistent=False)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, heads, head_dim]: rotates the pairs (i, i + head_dim / 2)."""
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """[head_dim / 2] radians per position, in float64, and the factor on cos and sin."""
    plain = rope.theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    keep = 1 - _yarn_ramp(rope, head_dim)
    return plain / rope.factor * (1 - keep) + plain * keep, _yarn_factor(rope)


def _yarn_ramp(rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023, section 3.2): 0 where a dimension turns often and is kept, 1 where it is interpolated."""

    def dimension(rotations: float) -> float:
        wavelengths = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers: the ramp becomes a step
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)
    return ramp.clamp(0, 1)


def _yarn_factor(rope: RopeConfig) -> float:
    """YaRN's attention factor (section 3.4), or DeepSeek's ratio of two where a model gives mscale_all_dim."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
