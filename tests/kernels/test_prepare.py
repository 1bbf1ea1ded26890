"""Input preparation does for rows of a padded bucket what a loop over them does."""

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import ints, poisoned
from worker_svc.kernels.prepare import SlotState, TokenInputs, append_tokens, prepare_decode
from worker_svc.kernels.prepare_mixed import RowInputs, prepare_mixed

BLOCK_SIZE = 16
NUM_SLOTS, WIDTH = 40, 5


def state_of(rng: np.random.Generator) -> SlotState:
    return SlotState(
        lengths=ints(rng.integers(1, WIDTH * BLOCK_SIZE, NUM_SLOTS).tolist()),
        last_tokens=ints(rng.integers(0, 1000, NUM_SLOTS).tolist()),
        block_tables=ints(rng.integers(0, 500, (NUM_SLOTS, WIDTH)).tolist()),
    )


def outputs(tokens: int) -> TokenInputs:
    return TokenInputs(*(poisoned(tokens, dtype=torch.int32) for _ in range(3)))


def slot_mapping(state: SlotState, slot: int, position: int) -> int:
    return int(state.block_tables[slot, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE


def test_decode_rows() -> None:
    rng = np.random.default_rng(0)
    state = state_of(rng)
    slots = [*rng.permutation(NUM_SLOTS)[:30].tolist(), *[-1] * 170]
    out, seq_lens = outputs(200), poisoned(200, dtype=torch.int32)
    prepare_decode(ints(slots), state, BLOCK_SIZE, out=out, seq_lens=seq_lens)
    lengths = [int(state.lengths[slot]) if slot >= 0 else 0 for slot in slots]
    assert seq_lens.tolist() == lengths
    assert out.token_ids.tolist() == [int(state.last_tokens[slot]) if slot >= 0 else 0 for slot in slots]
    assert out.positions.tolist() == [max(length - 1, 0) for length in lengths]
    assert out.slot_mapping.tolist() == [
        slot_mapping(state, slot, length - 1) if slot >= 0 else -1 for slot, length in zip(slots, lengths, strict=True)
    ]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(0, 150), st.integers(0, 4), st.integers())
def test_mixed_rows(counts: list[int], token_padding: int, row_padding: int, seed: int) -> None:
    """A count of 0 stands for a row that feeds back its slot's last sampled token."""
    rng = np.random.default_rng(abs(seed))
    state = state_of(rng)
    slots = rng.permutation(NUM_SLOTS)[: len(counts)].tolist()
    known: list[int] = []
    expected: dict[str, list[Any]] = {name: [] for name in ("ids", "positions", "mapping", "lengths", "samples")}
    starts, bounds = [], [0]
    for slot, count in zip(slots, counts, strict=True):
        if count == 0:
            start = int(state.lengths[slot]) - 1
            known.append(-1)
            expected["ids"].append(int(state.last_tokens[slot]))
        else:
            start = int(rng.integers(0, WIDTH * BLOCK_SIZE - count + 1))
            new = rng.integers(0, 1000, count).tolist()
            known += new
            expected["ids"] += new
        end = start + max(count, 1)
        expected["positions"] += range(start, end)
        expected["mapping"] += [slot_mapping(state, slot, position) for position in range(start, end)]
        expected["lengths"].append(end)
        expected["samples"].append(slot if end == int(state.lengths[slot]) else -1)
        starts.append(start)
        bounds.append(len(known))
    rows, tokens = len(counts) + row_padding, len(known) + token_padding
    out = outputs(tokens)
    row_inputs = RowInputs(
        seq_lens=poisoned(rows, dtype=torch.int32),
        block_tables=poisoned(rows, WIDTH, dtype=torch.int32),
        last_index=poisoned(rows, dtype=torch.int32),
        sampling_slots=poisoned(rows, dtype=torch.int32),
    )
    prepare_mixed(
        ints(known + [0] * token_padding),
        ints(slots + [0] * row_padding),
        ints(starts + [0] * row_padding),
        ints(bounds + bounds[-1:] * row_padding),
        state,
        BLOCK_SIZE,
        out=out,
        rows=row_inputs,
    )
    assert out.token_ids.tolist() == expected["ids"] + [0] * token_padding
    assert out.positions.tolist() == expected["positions"] + [0] * token_padding
    assert out.slot_mapping.tolist() == expected["mapping"] + [-1] * token_padding
    assert row_inputs.seq_lens.tolist() == expected["lengths"] + [0] * row_padding
    assert row_inputs.sampling_slots.tolist() == expected["samples"] + [-1] * row_padding
    assert row_inputs.last_index.tolist()[: len(counts)] == [bound - 1 for bound in bounds[1:]]
    assert all(0 <= index < tokens for index in row_inputs.last_index.tolist())
    assert torch.equal(row_inputs.block_tables[: len(counts)], state.block_tables[slots])
    assert (row_inputs.block_tables[len(counts) :] == 0).all()


def test_append() -> None:
    state = state_of(np.random.default_rng(0))
    before = state.lengths.tolist(), state.last_tokens.tolist()
    append_tokens(ints([7, -1, 3, -1]), ints([70, 10, 30, 20]), state)
    for slot in range(NUM_SLOTS):
        token = {7: 70, 3: 30}.get(slot)
        assert int(state.lengths[slot]) == before[0][slot] + (token is not None)
        assert int(state.last_tokens[slot]) == (before[1][slot] if token is None else token)
