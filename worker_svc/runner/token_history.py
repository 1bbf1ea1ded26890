"""The tokens so far of the slots whose rules look back at them, on the device: plans run ahead of what is sampled.

Has room for every slot from the start: what it took later would be missing elsewhere.
"""

import numpy as np
import torch
from torch import Tensor

from shared.types import IntArray
from worker_svc.layers.transfer import to_device
from worker_svc.step_inputs import LongArray, StepRows


class TokenHistory:
    """One row of tokens per slot."""

    def __init__(self, num_slots: int, max_model_len: int, device: torch.device) -> None:
        self._device = device
        self._kept = np.zeros(num_slots, dtype=bool)
        width = max_model_len + 1  # the token after the last one is sampled too, if nobody wants it
        self._tokens = torch.zeros(num_slots, width, dtype=torch.int32, device=device)

    def begin(self, slot: int, tokens: IntArray | None) -> None:
        """A sequence that begins with these tokens takes the slot; None: its rules don't look back."""
        self._kept[slot] = tokens is not None
        if tokens is not None:
            self._write(np.full(len(tokens), slot), np.arange(len(tokens)), tokens)

    def tell(self, rows: StepRows) -> None:
        """The tokens that a plan told."""
        if not len(rows.token_ids) or not self._kept.any():
            return
        slots = np.repeat(rows.slots, rows.known)
        kept = self._kept[slots]
        if kept.any():
            before = np.repeat(np.cumsum(rows.known) - rows.known, rows.known)
            positions = np.arange(len(slots)) - before + np.repeat(rows.starts, rows.known)
            self._write(slots[kept], positions[kept], rows.token_ids[kept])

    def _write(self, slots: LongArray, positions: LongArray, tokens: IntArray) -> None:
        rows, columns = to_device(np.stack((slots, positions)), self._device).unbind()
        self._tokens[rows, columns] = to_device(tokens.astype(np.int32), self._device)

    def read(self, slots: Tensor, length: int) -> Tensor:
        """[n, length]: their first tokens; of slots that keep nothing, whatever was there."""
        return self._tokens[slots, :length].long()

    def append(self, slots: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """What was sampled, [n] each. Only for slots that keep their tokens."""
        self._tokens[slots, positions] = token_ids.int()
