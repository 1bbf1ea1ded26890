"""One step on a GPU, from rows to logits and from logits to tokens, as launches that read all values on the device.

Shapes are those of a bucket, so a call can be captured in a CUDA graph and replayed for any rows that fit in it. Knows
no plan; what the rows are stands in the device state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.kernels.choose import choose_tokens
from worker_svc.kernels.deliver import Ring, deliver
from worker_svc.kernels.gumbel import gumbel_candidates
from worker_svc.kernels.parts import cut_rows
from worker_svc.kernels.prepare import TokenInputs, append_tokens, prepare_decode
from worker_svc.kernels.prepare_mixed import RowInputs, prepare_mixed
from worker_svc.kernels.scatter import scatter
from worker_svc.kernels.top_k import top_candidates
from worker_svc.layers.attention import ForwardInputs, StepAttention
from worker_svc.layers.flash_attention import FlashAttention
from worker_svc.layers.kv_cache import KVCache
from worker_svc.layers.paged_attention import DecodeAttention
from worker_svc.runner.batch import Limits
from worker_svc.runner.device_state import DeviceState
from worker_svc.runner.runner import CausalModel


@dataclass(frozen=True, slots=True)
class GpuAttention:
    """What computes attention on a GPU."""

    flash: FlashAttention | None
    """For rows of any length; None: the torch reference, which can't be captured."""
    own_decode: bool
    """The Triton kernel for rows of one token."""
    pdl: bool
    """Programmatic dependent launch: compute capability 9.0 and newer."""

    @property
    def name(self) -> str:
        """For people."""
        rest = "torch" if self.flash is None else self.flash.name
        return f"triton+{rest}" if self.own_decode else rest


class StepKernels:
    """The static tensors of a step and what is launched on them."""

    def __init__(
        self,
        model: CausalModel,
        cache: KVCache,
        state: DeviceState,
        limits: Limits,
        attention: GpuAttention,
        ring: Ring,
    ) -> None:
        self._model = model
        self._cache = cache
        self._state = state
        self._block_size = limits.block_size
        self._attention = attention
        self._ring = ring
        device, weight = state.values.device, model.head.weight
        slots = limits.max_num_seqs
        tokens = max(limits.max_num_batched_tokens, slots)
        empty = torch.zeros(3, tokens, dtype=torch.int32, device=device)
        self._tokens = TokenInputs(empty[0], empty[1], empty[2])
        self._seq_lens = torch.zeros(slots, dtype=torch.int32, device=device)
        self._tables = torch.zeros(slots, limits.blocks_per_sequence, dtype=torch.int32, device=device)
        self._last_index = torch.zeros(slots, dtype=torch.int32, device=device)
        self._sampling_slots = torch.zeros(slots, dtype=torch.int32, device=device)
        self._counting = torch.arange(slots + 1, dtype=torch.int32, device=device)
        self.logits = torch.zeros(slots, weight.shape[0], dtype=weight.dtype, device=device)
        """[S, tokens of this rank, with its padding]: one row per row of the step."""
        self.sampled = torch.zeros(2, slots, dtype=torch.int32, device=device)
        """Token ids, and 1 where a row failed."""

    def update(self, changes: Tensor) -> None:
        """Brings changes, [2, n] as DeviceState.take_changes gives them, into the state."""
        scatter(changes, out=self._state.values)

    def decode(self, rows: int) -> None:
        """Logits of rows of one token each, the last sampled one of their slots."""
        state = self._state
        slots, tokens, seq_lens = state.row_slots[:rows], self._first_tokens(rows), self._seq_lens[:rows]
        pdl = self._attention.pdl
        prepare_decode(slots, state.slots, self._block_size, out=tokens, seq_lens=seq_lens, pdl=pdl)
        attention: StepAttention
        if self._attention.own_decode:
            kv_heads = self._cache.layers[0].key.shape[2]
            parts = cut_rows(slots, state.slots.lengths, kv_heads, pdl=pdl)
            attention = DecodeAttention(state.slots.block_tables, parts, pdl)
        else:
            assert self._attention.flash is not None
            tables = state.slots.block_tables.index_select(0, slots.clamp(min=0))
            attention = self._attention.flash.prepare(self._counting[: rows + 1], seq_lens, tables, 1)
        self._sampling_slots[:rows].copy_(slots)
        self._head(self._forward(tokens, attention))

    def mixed(self, tokens: int, rows: int, attention: StepAttention | None = None) -> Tensor:
        """Logits of the last tokens of rows of any number; the hidden states of all, [tokens, hidden].

        `attention` stands in where there is no FlashAttention.
        """
        state = self._state
        inputs = self._first_tokens(tokens)
        row_inputs = RowInputs(
            self._seq_lens[:rows], self._tables[:rows], self._last_index[:rows], self._sampling_slots[:rows]
        )
        cu_seqlens = state.cu_seqlens[: rows + 1]
        prepare_mixed(
            state.known_ids[:tokens],
            state.row_slots[:rows],
            state.starts[:rows],
            cu_seqlens,
            state.slots,
            self._block_size,
            out=inputs,
            rows=row_inputs,
        )
        if attention is None:
            assert self._attention.flash is not None
            attention = self._attention.flash.prepare(cu_seqlens, row_inputs.seq_lens, row_inputs.block_tables, tokens)
        hidden = self._forward(inputs, attention)
        self._head(hidden.index_select(0, row_inputs.last_index))
        return hidden

    def sample(self, rows: int, narrow: bool) -> None:
        """Samples from the logits where a row reaches its sequence's end, takes the tokens into the state, and writes
        them to the host.

        `narrow`: whether some rows sample from their top 64 tokens or fewer.
        """
        head, sampling, pdl = self._model.head, self._state.sampling, self._attention.pdl
        slots, logits = self._sampling_slots[:rows], self.logits[:rows]
        tokens, failed = self.sampled[0, :rows], self.sampled[1, :rows]
        candidates = gumbel_candidates(logits, slots, sampling, first_token=head.start, pdl=pdl)
        top = top_candidates(logits, slots, sampling, first_token=head.start, pdl=pdl) if narrow else None
        choose_tokens(
            head.group.all_gather(candidates).flatten(0, 1),
            None if top is None else head.group.all_gather(top),
            slots,
            sampling,
            tokens=tokens,
            failed=failed,
            pdl=pdl,
        )
        append_tokens(slots, tokens, self._state.slots, pdl=pdl)
        deliver(self.sampled, rows, self._ring, pdl=pdl)

    def _first_tokens(self, count: int) -> TokenInputs:
        all_tokens = self._tokens
        return TokenInputs(all_tokens.token_ids[:count], all_tokens.positions[:count], all_tokens.slot_mapping[:count])

    def _forward(self, tokens: TokenInputs, attention: StepAttention) -> Tensor:
        inputs = ForwardInputs(tokens.token_ids, tokens.positions, tokens.slot_mapping, attention)
        return self._model(inputs, self._cache.layers)

    def _head(self, hidden: Tensor) -> None:
        self._model.head.logits(hidden, out=self.logits[: len(hidden)])
