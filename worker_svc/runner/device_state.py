"""The batch state that a GPU keeps by slot, and how it follows the host's: one scatter in a step that changes it.

Everything lies in one array of int32, so a step's changes, of whatever kind, are pairs of (index, value). Lengths and
last tokens belong to the device once a sequence is admitted: plans run ahead of results. What is right to change is
runner.batch's knowledge; this file only mirrors it.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from shared.types import Admission, IntArray
from worker_svc.kernels.candidates import SlotSampling
from worker_svc.kernels.prepare import SlotState
from worker_svc.runner.batch import Limits
from worker_svc.step_inputs import LongArray

MAX_SUPPRESSED = 8
"""Suppressed ids of a slot that the kernels know of."""
_ALIGNMENT = 64  # elements: kernels read 16 bytes at a time


class DeviceState:
    """Views of the array, and the changes that are not there yet."""

    def __init__(self, limits: Limits, device: torch.device) -> None:
        slots, blocks, tokens = limits.max_num_seqs, limits.blocks_per_sequence, limits.max_num_batched_tokens
        sizes = {
            "seeds": (slots, 2),
            "lengths": (slots,),
            "last_tokens": (slots,),
            "temperature": (slots,),
            "top_k": (slots,),
            "top_p": (slots,),
            "min_p": (slots,),
            "suppressed_until": (slots,),
            "suppressed_ids": (slots, MAX_SUPPRESSED),
            "tables": (slots, blocks),
            "row_slots": (slots,),
            "starts": (slots,),
            "cu_seqlens": (slots + 1,),
            "known_ids": (tokens,),
        }
        lengths = [int(np.prod(shape)) for shape in sizes.values()]
        offsets = [0, *accumulate(-(-length // _ALIGNMENT) * _ALIGNMENT for length in lengths)]
        self.values = torch.zeros(offsets[-1], dtype=torch.int32, device=device)
        self._starts = dict(zip(sizes, offsets, strict=False))
        self._blocks = blocks
        view = {
            name: self.values[start : start + length].view(shape)
            for (name, shape), start, length in zip(sizes.items(), offsets, lengths, strict=False)
        }
        self.slots = SlotState(view["lengths"], view["last_tokens"], view["tables"])
        self.sampling = SlotSampling(
            temperature=view["temperature"].view(torch.float32),
            top_k=view["top_k"],
            top_p=view["top_p"].view(torch.float32),
            min_p=view["min_p"].view(torch.float32),
            seeds=view["seeds"].view(torch.int64)[:, 0],
            positions=view["lengths"],
            suppressed_ids=view["suppressed_ids"],
            suppressed_until=view["suppressed_until"],
        )
        self.row_slots = view["row_slots"]
        """[S]: the slot of each row of the step, -1 after the last."""
        self.starts = view["starts"]
        self.cu_seqlens = view["cu_seqlens"]
        self.known_ids = view["known_ids"]
        self._row_slots = np.full(slots, -1, dtype=np.int32)  # what the device has
        self.row_slots.fill_(-1)
        self._changes: list[tuple[NDArray[np.int64], IntArray]] = []

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Sequences take their slots."""
        if not admissions:
            return
        slots = np.array([admission.slot for admission in admissions])
        sampling = [admission.sampling for admission in admissions]
        suppressed = np.full((len(slots), MAX_SUPPRESSED), -1, dtype=np.int32)
        for row, parameters in zip(suppressed, sampling, strict=True):
            row[: len(parameters.suppressed_ids)] = parameters.suppressed_ids[:MAX_SUPPRESSED]
        seeds = np.array([parameters.seed for parameters in sampling], dtype=np.uint64).view(np.int32)
        until = [admission.prompt_length + admission.sampling.min_tokens for admission in admissions]
        self._stage("lengths", slots, [admission.known_length for admission in admissions])
        self._stage("temperature", slots, _bits([parameters.temperature for parameters in sampling]))
        self._stage("top_k", slots, [parameters.top_k for parameters in sampling])
        self._stage("top_p", slots, _bits([parameters.top_p for parameters in sampling]))
        self._stage("min_p", slots, _bits([parameters.min_p for parameters in sampling]))
        self._stage("suppressed_until", slots, until)
        self._stage("seeds", (2 * slots[:, None] + np.arange(2)).ravel(), seeds)
        at = (MAX_SUPPRESSED * slots[:, None] + np.arange(MAX_SUPPRESSED)).ravel()
        self._stage("suppressed_ids", at, suppressed.ravel())
        for admission in admissions:
            first = admission.slot * self._blocks
            self._stage("tables", first + np.arange(len(admission.block_ids)), admission.block_ids)

    def grow(self, slots: IntArray, columns: NDArray[np.int64], blocks: IntArray) -> None:
        """Blocks at the ends of slots' tables."""
        if len(slots):
            self._stage("tables", slots.astype(np.int64) * self._blocks + columns, blocks)

    def set_rows(self, slots: LongArray) -> None:
        """The rows of the step."""
        rows = np.full_like(self._row_slots, -1)
        rows[: len(slots)] = slots
        changed = np.flatnonzero(rows != self._row_slots)
        if len(changed):
            self._stage("row_slots", changed, rows[changed])
            self._row_slots = rows

    def set_tokens(self, starts: LongArray, cu_seqlens: IntArray, known_ids: IntArray, bucket_rows: int) -> None:
        """Rows with any number of tokens: `starts` [R], `cu_seqlens` [R + 1], `known_ids` [T], -1 where unknown. Rows
        from R to `bucket_rows` have none."""
        bounds = np.full(bucket_rows + 1, cu_seqlens[-1], dtype=np.int32)
        bounds[: len(cu_seqlens)] = cu_seqlens
        self._stage("starts", np.arange(len(starts)), starts)
        self._stage("cu_seqlens", np.arange(len(bounds)), bounds)
        self._stage("known_ids", np.arange(len(known_ids)), known_ids)

    def take_changes(self) -> IntArray | None:
        """[2, n]: indices and values since the last call; None: there are none. No index comes twice in one plan."""
        if not self._changes:
            return None
        changes = np.stack([np.concatenate(part, dtype=np.int32) for part in zip(*self._changes, strict=True)])
        self._changes = []
        return changes

    def drop_changes(self) -> None:
        """A new epoch: what its slots hold comes with their admissions."""
        self._changes = []
        self._row_slots = np.full_like(self._row_slots, -2)  # unknown: the next step sends all

    def _stage(self, name: str, index: NDArray[np.int64], values: IntArray | LongArray | Sequence[int]) -> None:
        self._changes.append((self._starts[name] + index, np.asarray(values, dtype=np.int32)))


def _bits(values: Sequence[float]) -> IntArray:
    return np.array(values, dtype=np.float32).view(np.int32)
