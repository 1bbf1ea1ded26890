"""How each slot samples; the parameters of the rows that sample in one step are gathered from it. Numpy only."""

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRequest
from shared.types import NO_PAIRS, Admission, IntArray, RowSampling, TokenMask
from worker_svc.step_inputs import Bools, SamplingInputs


class SamplingState:
    """Sampling parameters by slot."""

    def __init__(self, num_slots: int, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._suppressed_until = np.zeros(num_slots, dtype=np.int64)
        self._suppressed_ids: list[tuple[int, ...]] = [()] * num_slots

    def admit(self, field: str, admission: Admission) -> None:
        """Raises InvalidRequest, naming `field`, for a parameter out of range."""
        slot, sampling = admission.slot, admission.sampling
        _check(field, sampling, self._vocabulary_size)
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seeds[slot] = sampling.seed
        self._suppressed_until[slot] = admission.prompt_length + sampling.min_tokens
        self._suppressed_ids[slot] = sampling.suppressed_ids

    def inputs(
        self,
        slots: NDArray[np.int64],
        last_index: NDArray[np.int64],
        positions: NDArray[np.int64],
        masks: tuple[TokenMask, ...],
    ) -> SamplingInputs:
        """Raises InvalidRequest for a mask that fits no sampling row."""
        return SamplingInputs(
            slots=slots,
            last_index=last_index,
            positions=positions,
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seeds=self._seeds[slots],
            suppressed=self._suppressed(slots, positions),
            masks=tuple(self._mask(slots, mask) for mask in masks),
        )

    def _suppressed(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> IntArray:
        rows = np.flatnonzero(positions < self._suppressed_until[slots])
        pairs = [(row, token) for row in rows for token in self._suppressed_ids[slots[row]]]
        return np.array(pairs, dtype=np.int32).reshape(-1, 2) if pairs else NO_PAIRS

    def _mask(self, slots: NDArray[np.int64], mask: TokenMask) -> tuple[int, Bools]:
        row = np.flatnonzero(slots == mask.slot)
        if len(row) != 1:
            raise InvalidRequest("masks", f"slot {mask.slot} does not sample in this plan")
        if len(mask.allowed) != -(-self._vocabulary_size // 8):
            raise InvalidRequest("masks", f"{len(mask.allowed)} bytes for {self._vocabulary_size} tokens")
        bits = np.unpackbits(np.frombuffer(mask.allowed, dtype=np.uint8), bitorder="little")
        return int(row[0]), bits[: self._vocabulary_size].astype(bool)


def _check(field: str, sampling: RowSampling, vocabulary_size: int) -> None:
    """Written so that NaN fails every bound."""
    for name, good, bound in (
        ("temperature", 0 <= sampling.temperature < np.inf, "[0, infinity)"),
        ("top_k", sampling.top_k >= 0, "[0, infinity)"),
        ("top_p", 0 < sampling.top_p <= 1, "(0, 1]"),
        ("min_p", 0 <= sampling.min_p <= 1, "[0, 1]"),
        ("min_tokens", sampling.min_tokens >= 0, "[0, infinity)"),
    ):
        if not good:
            raise InvalidRequest(f"{field}.{name}", f"{getattr(sampling, name)} is not within {bound}")
    for token in sampling.suppressed_ids:
        if not 0 <= token < vocabulary_size:
            raise InvalidRequest(f"{field}.suppressed_ids", f"id {token} is not within [0, {vocabulary_size})")
