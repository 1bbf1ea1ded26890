"""The tokens so far of the slots whose rules look back at them, on the device: plans run ahead of what is sampled.

A slot that needs it has a row, which its next sequences keep; memory grows with the number of such slots.
"""

import numpy as np
import torch
from torch import Tensor

from shared.types import IntArray
from worker_svc.layers.transfer import to_device
from worker_svc.step_inputs import LongArray, StepRows

_FIRST_ROWS = 8


class TokenHistory:
    """Rows of tokens by slot."""

    def __init__(self, num_slots: int, max_model_len: int, device: torch.device) -> None:
        self._device = device
        self._width = max_model_len + 1  # the token after the last one is sampled too, if nobody wants it
        self._most_rows = num_slots
        self._row_of = np.full(num_slots, -1, dtype=np.int64)
        self._num_rows = 0
        self._tokens = torch.zeros(min(_FIRST_ROWS, num_slots), self._width, dtype=torch.int32, device=device)

    def keep(self, slot: int, tokens: IntArray) -> None:
        """A sequence that begins with these tokens takes the slot."""
        if self._row_of[slot] < 0:
            if self._num_rows == len(self._tokens):
                rows = min(2 * self._num_rows, self._most_rows) - self._num_rows
                self._tokens = torch.cat((self._tokens, self._tokens.new_zeros(rows, self._width)))
            self._row_of[slot] = self._num_rows
            self._num_rows += 1
        self._write(np.full(len(tokens), slot), np.arange(len(tokens)), tokens)

    def tell(self, rows: StepRows) -> None:
        """The tokens that a plan told."""
        if not self._num_rows or not len(rows.token_ids):
            return
        slots = np.repeat(rows.slots, rows.known)
        kept = self._row_of[slots] >= 0
        if kept.any():
            before = np.repeat(np.cumsum(rows.known) - rows.known, rows.known)
            positions = np.arange(len(slots)) - before + np.repeat(rows.starts, rows.known)
            self._write(slots[kept], positions[kept], rows.token_ids[kept])

    def _write(self, slots: LongArray, positions: LongArray, tokens: IntArray) -> None:
        at, values = np.stack((self._row_of[slots], positions)), tokens.astype(np.int32)
        rows, columns = to_device(at, self._device).unbind()
        self._tokens[rows, columns] = to_device(values, self._device)

    def rows_of(self, slots: LongArray) -> Tensor:
        """[n]: what `read` and `append` call the slots; those that keep nothing share one."""
        return to_device(self._row_of[slots].clip(min=0), self._device)

    def read(self, rows: Tensor, length: int) -> Tensor:
        """[n, length]: their first tokens."""
        return self._tokens[rows, :length].long()

    def append(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """What was sampled, [n] each. Only for slots that keep their tokens."""
        self._tokens[rows, positions] = token_ids.int()
