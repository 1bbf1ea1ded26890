"""The torch attention against a loop over tokens, and what the interface promises about storing K/V."""

import numpy as np
import torch

from shared.types import Admission, RowSampling, StepPlan
from worker_svc.layers import attention
from worker_svc.layers.attention import TorchAttention
from worker_svc.layers.kv_cache import KVCache, LayerCache
from worker_svc.layers.torch_ops import TorchOps
from worker_svc.runner.batch import BatchState, Limits
from worker_svc.step_inputs import StepInputs

CPU, OPS = torch.device("cpu"), TorchOps()
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4
LENGTHS = [1, 3, 9, 4, 17, 12]
CACHED = [0, 0, 8, 0, 16, 0]


def batch() -> StepInputs:
    """Rows of one token and of many, with and without a cached part, blocks scattered."""
    state = BatchState(Limits(8, 64, 32, BLOCK, 64, 10))
    blocks = np.random.default_rng(0).permutation(64).astype(np.int32).reshape(8, 8)
    admitted, grown, rows = [], [], []
    for slot, (length, cached) in enumerate(zip(LENGTHS, CACHED, strict=True)):
        table, used = blocks[slot], -(-length // BLOCK)
        admitted.append(Admission(slot, length, cached, length, table[: cached // BLOCK], RowSampling()))
        grown += [(slot, block) for block in table[cached // BLOCK : used]]
        rows.append((slot, length - cached, length - cached))
    total = sum(LENGTHS) - sum(CACHED)
    plan = StepPlan(1, 1, tuple(admitted), np.array(grown), np.array(rows), np.zeros(total, dtype=np.int32))
    return state.inputs(state.fold(plan))


def tensors(inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LayerCache]:
    generator = torch.Generator().manual_seed(0)
    count = len(inputs.token_ids)
    q, k, v = (
        torch.randn(count, heads, DIM, dtype=torch.float64, generator=generator)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    cache = KVCache(1, 64, BLOCK, KV_HEADS, DIM, torch.float64).layers[0]
    cache.key.normal_(generator=generator)
    cache.value.normal_(generator=generator)
    return q, k, v, cache


def attend(inputs: StepInputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    """Stores K/V at unrotated positions, then attends."""
    still = torch.ones(1, DIM // 2, dtype=torch.float64), torch.zeros(1, DIM // 2, dtype=torch.float64)
    rotation = OPS.rotation(*still, torch.zeros(len(q), dtype=torch.int64))
    qkv = torch.cat((q, k, v), dim=1).flatten(1)
    query = OPS.rotate_and_store(qkv, None, rotation, torch.from_numpy(inputs.slot_mapping), cache)
    return TorchAttention(CPU).prepare(inputs)(query, cache)


def naive(inputs: StepInputs, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: LayerCache) -> torch.Tensor:
    keys, values = cache.key.clone(), cache.value.clone()
    for token, slot in enumerate(inputs.slot_mapping.tolist()):
        keys[slot // BLOCK, slot % BLOCK], values[slot // BLOCK, slot % BLOCK] = k[token], v[token]
    out = torch.empty_like(q)
    for row in range(len(inputs.seq_lens)):
        for token in range(inputs.cu_seqlens[row], inputs.cu_seqlens[row + 1]):
            seen = range(int(inputs.positions[token]) + 1)
            places = [(int(inputs.block_tables[row, i // BLOCK]), i % BLOCK) for i in seen]
            for head in range(HEADS):
                kv_head = head * KV_HEADS // HEADS
                context = torch.stack([keys[b, o, kv_head] for b, o in places])
                weights = (context @ q[token, head] / DIM**0.5).softmax(0)
                out[token, head] = weights @ torch.stack([values[b, o, kv_head] for b, o in places])
    return out


def test_what_a_block_held_before_is_never_read() -> None:
    """Not even as a masked NaN: a request that gave NaN may have been aborted before anyone noticed."""
    inputs = batch()
    q, k, v, cache = tensors(inputs)
    expected = attend(inputs, q, k, v, LayerCache(cache.key.clone(), cache.value.clone()))
    places = {
        (int(inputs.block_tables[row, i // BLOCK]), i % BLOCK)
        for row, length in enumerate(inputs.seq_lens)
        for i in range(int(length))
    }
    for memory in (cache.key, cache.value):
        clean = memory.clone()
        memory.fill_(torch.nan)
        for place in places:
            memory[place] = clean[place]
    assert torch.equal(attend(inputs, q, k, v, cache), expected)


def test_equal_to_a_loop_over_tokens() -> None:
    inputs = batch()
    q, k, v, cache = tensors(inputs)
    expected = naive(inputs, q, k, v, cache)
    torch.testing.assert_close(attend(inputs, q, k, v, cache), expected, atol=1e-12, rtol=0)


def test_decode_rows_in_several_groups(monkeypatch) -> None:
    """Long contexts are gathered a few rows at a time."""
    inputs = batch()
    q, k, v, cache = tensors(inputs)
    expected = naive(inputs, q, k, v, cache)
    monkeypatch.setattr(attention, "_GATHER_LIMIT", 18)
    step = TorchAttention(CPU).prepare(inputs)
    assert sum(len(group.tokens) == len(group.blocks) for group in step.groups) == 2
    torch.testing.assert_close(attend(inputs, q, k, v, cache), expected, atol=1e-12, rtol=0)


def test_tokens_of_slot_minus_one_are_not_stored() -> None:
    """Padding of a batch: it must not write over a block of anyone."""
    inputs = batch()
    q, k, v, cache = tensors(inputs)
    before = cache.key.clone()
    slots = inputs.slot_mapping.copy()
    inputs.slot_mapping[5:] = -1
    attend(inputs, q, k, v, cache)
    changed = (cache.key != before).flatten(2).any(-1).flatten().nonzero()[:, 0]
    assert sorted(changed.tolist()) == sorted(slots[:5].tolist())


def test_zeroed_blocks_are_zero_in_every_layer() -> None:
    cache = KVCache(3, 8, BLOCK, KV_HEADS, DIM, torch.float32)
    for layer in cache.layers:
        layer.key.fill_(float("nan"))
        layer.value.fill_(1.0)
    cache.zero(np.array([2, 5], dtype=np.int32))
    for layer in cache.layers:
        assert (layer.key[[2, 5]] == 0).all() and (layer.value[[2, 5]] == 0).all()
        assert layer.key[[0, 1, 3, 4, 6, 7]].isnan().all()
