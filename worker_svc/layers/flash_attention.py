"""Attention of rows of any length that a GPU holds, by the FlashAttention packages, and which of them can run here.

Every call depends on values that are on the device alone, so that it can be captured in a CUDA graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol, TypeAlias

import structlog
import torch
from torch import Tensor
from torch.nn import functional

from shared.errors import StartupError
from worker_svc.layers.kv_cache import LayerCache

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a rank's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class FlashStep:
    """One step's rows. See layers.attention.StepAttention."""

    attend: Callable[..., Any]
    shared: dict[str, Any]

    def __call__(self, query: Tensor, cache: LayerCache) -> Tensor:
        """See StepAttention."""
        out: Tensor = self.attend(query, cache.key, cache.value, **self.shared)
        return out


class FlashAttention(Protocol):
    """A version of FlashAttention, for one shape."""

    name: ClassVar[str]
    """As --attention has it."""
    title: ClassVar[str]

    def prepare(self, cu_seqlens: Tensor, seq_lens: Tensor, block_tables: Tensor, max_query: int) -> FlashStep:
        """For R rows: `cu_seqlens` [R + 1], `seq_lens` [R], `block_tables` [R, blocks], all int32; no row has more
        than `max_query` tokens. Does once what every layer would repeat."""


class FlashAttention3:
    """The package flash_attn_interface: GPUs of compute capability 9."""

    name: ClassVar[str] = "fa3"
    title: ClassVar[str] = "FlashAttention-3"

    def __init__(self, heads: Heads, block_size: int) -> None:
        """Raises ImportError where the package is not installed."""
        package = import_module("flash_attn_interface")
        self._attend: Callable[..., Any] = package.flash_attn_with_kvcache
        self._schedule: Callable[..., Any] = package.get_scheduler_metadata
        self._heads = heads
        self._block_size = block_size

    @staticmethod
    def unfit(capability: tuple[int, int], block_size: int) -> str | None:
        """Why it can't run on such a GPU, with such blocks."""
        return None if capability[0] == 9 else "it needs a GPU of compute capability 9"

    def prepare(self, cu_seqlens: Tensor, seq_lens: Tensor, block_tables: Tensor, max_query: int) -> FlashStep:
        """See FlashAttention."""
        heads = self._heads
        shared: dict[str, Any] = {
            "page_table": block_tables,
            "cache_seqlens": seq_lens,
            "cu_seqlens_q": cu_seqlens,
            "max_seqlen_q": max_query,
            "causal": True,
            "num_splits": 1,
        }
        shared["scheduler_metadata"] = self._schedule(
            len(seq_lens),
            max_query,
            block_tables.shape[1] * self._block_size,
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            seq_lens,
            heads.dtype,
            cu_seqlens_q=cu_seqlens,
            page_size=self._block_size,
            causal=True,
            num_splits=1,
        )
        return FlashStep(self._attend, shared)


class FlashAttention2:
    """The package flash_attn: GPUs of compute capability 8 and newer, large blocks."""

    name: ClassVar[str] = "fa2"
    title: ClassVar[str] = "FlashAttention-2"

    def __init__(self, heads: Heads, block_size: int) -> None:
        """Raises ImportError where the package is not installed."""
        self._attend: Callable[..., Any] = import_module("flash_attn").flash_attn_varlen_func
        self._block_size = block_size

    @staticmethod
    def unfit(capability: tuple[int, int], block_size: int) -> str | None:
        """Why it can't run on such a GPU, with such blocks."""
        if capability < (8, 0):
            return "it needs a GPU of compute capability 8 or newer"
        return f"it needs a --block-size of 256 or a multiple, not {block_size}" if block_size % 256 else None

    def prepare(self, cu_seqlens: Tensor, seq_lens: Tensor, block_tables: Tensor, max_query: int) -> FlashStep:
        """See FlashAttention."""
        shared: dict[str, Any] = {
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            "max_seqlen_q": max_query,
            "max_seqlen_k": block_tables.shape[1] * self._block_size,
            "causal": True,
            "block_table": block_tables,
        }
        return FlashStep(self._attend, shared)


_Version: TypeAlias = type[FlashAttention3] | type[FlashAttention2]

_VERSIONS: dict[str, _Version] = {version.name: version for version in (FlashAttention3, FlashAttention2)}


def choose_flash(attention: str, heads: Heads, block_size: int, capability: tuple[int, int]) -> FlashAttention | None:
    """What --attention asks for, or the first version that can run here; None: none can, which a warning explains.

    Raises StartupError where the one that was asked for can't run.
    """
    if attention == "triton":
        return None
    problems = []
    for name in [attention] if attention in _VERSIONS else _VERSIONS:
        made = _try(_VERSIONS[name], heads, block_size, capability)
        if not isinstance(made, str):
            return made
        problems.append(f"{_VERSIONS[name].title}: {made}")
    if attention in _VERSIONS:
        raise StartupError(f"--attention {attention}: {problems[0]}")
    _log.warning("the torch reference computes attention of prompts: it is slow", reason="; ".join(problems))
    return None


def _try(version: _Version, heads: Heads, block_size: int, capability: tuple[int, int]) -> FlashAttention | str:
    """It, or why it can't run."""
    if heads.dtype != torch.bfloat16:
        return f"it does not compute in {str(heads.dtype).removeprefix('torch.')}"
    problem = version.unfit(capability, block_size)
    if problem is not None:
        return problem
    try:
        return version(heads, block_size)
    except ImportError as missing:
        return f"it is not installed ({missing})"
