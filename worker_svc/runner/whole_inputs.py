"""All inputs of a forward pass, from the rows of a step: what the torch runner computes from.

Numpy only; knows neither plans nor slots' state.
"""

import numpy as np

from shared.types import IntArray
from worker_svc.step_inputs import LongArray, SamplingInputs, StepInputs, StepRows


def step_inputs(
    rows: StepRows, tables: IntArray, num_blocks: LongArray, block_size: int, sampling: SamplingInputs
) -> StepInputs:
    """Of R rows with their block tables, [R, blocks], of which the first num_blocks, [R], count."""
    cu_seqlens = rows.cu_seqlens
    row_of = np.repeat(np.arange(len(rows.slots)), rows.counts)
    positions = np.arange(len(row_of)) + (rows.starts - cu_seqlens[:-1])[row_of]
    block, offset = np.divmod(positions, block_size)
    fed_back = rows.known == 0
    return StepInputs(
        token_ids=rows.all_token_ids.astype(np.int64),
        positions=positions,
        slot_mapping=tables[row_of, block].astype(np.int64) * block_size + offset,
        cu_seqlens=cu_seqlens,
        seq_lens=(rows.starts + rows.counts).astype(np.int32),
        block_size=block_size,
        block_tables=_filled_up(tables, num_blocks),
        feedback_index=cu_seqlens[:-1][fed_back].astype(np.int64),
        feedback_slots=rows.slots[fed_back],
        sampling=sampling,
        zeroed=rows.zeroed,
    )


def _filled_up(tables: IntArray, num_blocks: LongArray) -> IntArray:
    """With a block of the row itself, so that what a row masks out is never another sequence's NaN."""
    width = int(num_blocks.max(initial=0))
    beyond = np.arange(width) >= num_blocks[:, None]
    filled: IntArray = np.where(beyond, tables[:, :1], tables[:, :width])
    return filled
