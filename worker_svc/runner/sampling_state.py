"""How each slot samples; the parameters of the rows that sample in one step are gathered from it. Numpy only."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.errors import InvalidRequest
from shared.logit_rules import NO_RULES, LogitRules
from shared.logprobs import MOST_LOGPROBS
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
        self._ruled = np.zeros(num_slots, dtype=bool)
        self._logprobs = np.full(num_slots, -1, dtype=np.int64)

    def admit(self, field: str, admission: Admission) -> None:
        """Raises InvalidRequest, naming `field`, for a parameter out of range."""
        slot, sampling = admission.slot, admission.sampling
        _check(field, sampling, self._vocabulary_size)
        _check_rules(f"{field}.rules", sampling.rules, self._vocabulary_size)
        _check_logprobs(field, admission, self._vocabulary_size)
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seeds[slot] = sampling.seed
        self._suppressed_until[slot] = admission.prompt_length + sampling.min_tokens
        self._suppressed_ids[slot] = sampling.suppressed_ids
        self._ruled[slot] = sampling.rules != NO_RULES
        self._logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs

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
            ruled=self._ruled[slots],
            logprobs=self._logprobs[slots],
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
    _check_ids(f"{field}.suppressed_ids", sampling.suppressed_ids, vocabulary_size)


def _check_rules(field: str, rules: LogitRules, vocabulary_size: int) -> None:
    if rules == NO_RULES:
        return
    penalties = (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty)
    if not (np.isfinite(penalties).all() and rules.repetition_penalty > 0):
        raise InvalidRequest(field, f"penalties {penalties} are not finite, or the first is not above 0")
    if not np.isfinite([value for _, value in rules.bias]).all():
        raise InvalidRequest(f"{field}.bias", "has a value that is not finite")
    if rules.allowed and len(rules.allowed) != -(-vocabulary_size // 8):
        raise InvalidRequest(f"{field}.allowed", f"{len(rules.allowed)} bytes for {vocabulary_size} tokens")
    if not all(rules.bad_words):
        raise InvalidRequest(f"{field}.bad_words", "has a word without tokens")
    _check_ids(f"{field}.bias", [token for token, _ in rules.bias], vocabulary_size)
    _check_ids(f"{field}.bad_words", [token for word in rules.bad_words for token in word], vocabulary_size)


def _check_logprobs(field: str, admission: Admission, vocabulary_size: int) -> None:
    sampling = admission.sampling
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        most = min(MOST_LOGPROBS, vocabulary_size)
        if value is not None and not 0 <= value <= most:
            raise InvalidRequest(f"{field}.{name}", f"{value} is not within [0, {most}]")
    begin, cached = admission.prompt_logprobs_from, admission.cached_length
    if sampling.prompt_logprobs is not None and cached >= begin < admission.prompt_length:
        raise InvalidRequest(f"{field}.prompt_logprobs_from", f"{begin} is not above the cached length, {cached}")
    if len(admission.cached_ids) != (cached if sampling.rules.looks_back else 0):
        raise InvalidRequest(f"{field}.cached_ids", f"{len(admission.cached_ids)} ids of {cached} cached tokens")
    _check_ids(f"{field}.cached_ids", admission.cached_ids, vocabulary_size)


def _check_ids(field: str, ids: Sequence[int] | IntArray, vocabulary_size: int) -> None:
    values = np.asarray(ids, dtype=np.int64)
    wrong = values[(values < 0) | (values >= vocabulary_size)]
    if len(wrong):
        raise InvalidRequest(field, f"id {wrong[0]} is not within [0, {vocabulary_size})")
