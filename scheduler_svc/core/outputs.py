"""What the core tells its caller: tokens, starts, ends, load. Knows nothing of who listens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.logprobs import NO_LOGPROBS, TokenLogprobs
from shared.errors import TandemError
from shared.types import NO_INTS, FinishReason, IntArray

KeyArray: TypeAlias = NDArray[np.int64]

NO_KEYS: KeyArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that the core no longer knows."""

    key: int
    how: FinishReason | TandemError
    """The error is of the kind that its client is to see."""
    stop_token_id: int | None = None
    """With STOP_TOKEN: the token, which is among the output."""


class RequeueCause(Enum):
    """Why a running sequence went back to the queue, to be computed again."""

    PREEMPTED = "preempted"
    """More important ones needed its blocks."""
    WORKER_LOST = "worker lost"
    TAINTED = "tainted"
    """It shared blocks with a request whose logits had no finite maximum."""
    DRAINED = "drained"
    """Its worker is about to leave, and another one had room."""


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What is new for the callers of `submit`. Started and requeued precede prompt logprobs
    precede tokens precede ended."""

    keys: KeyArray = field(default_factory=lambda: NO_KEYS)
    """[num_tokens]: whose tokens `token_ids` are, element by element."""
    token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    """[num_tokens]"""
    started: tuple[tuple[int, int], ...] = ()
    """(key, prompt tokens found in the prefix cache) of sequences admitted for the first time."""
    ended: tuple[Ended, ...] = ()
    logprobs: TokenLogprobs = NO_LOGPROBS
    """Of `token_ids`."""
    prompt_logprobs: tuple[tuple[int, bytes], ...] = ()
    """(key, entries of the next tokens of its prompt)."""
    requeued: tuple[tuple[int, RequeueCause], ...] = ()
    """(key, why) of sequences that went back to the queue; their next tokens come after a replay."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not (len(self.keys) or self.started or self.ended or self.prompt_logprobs or self.requeued)


class Outbox:
    """Starts, returns to the queue, ends and logprobs of prompts that no StepOutputs has carried yet."""

    def __init__(self) -> None:
        self._started: dict[int, int] = {}
        self._prompt_logprobs: list[tuple[int, bytes]] = []
        self._requeued: dict[int, RequeueCause] = {}
        self._ended: list[Ended] = []

    def start(self, key: int, cached_tokens: int) -> None:
        """The sequence was admitted for the first time."""
        self._started[key] = cached_tokens

    def requeue(self, key: int, cause: RequeueCause) -> None:
        """The sequence runs no more and will again."""
        self._requeued[key] = cause

    def end(self, ended: Ended) -> None:
        """The sequence is over."""
        self._ended.append(ended)

    def tell_prompt(self, key: int, entries: bytes) -> None:
        """Logprobs of the next tokens of the sequence's prompt."""
        self._prompt_logprobs.append((key, entries))

    def drop(self, key: int) -> None:
        """The caller wants to hear no more of the sequence."""
        self._started.pop(key, None)
        self._requeued.pop(key, None)

    def take(
        self, keys: KeyArray = NO_KEYS, token_ids: IntArray = NO_INTS, logprobs: TokenLogprobs = NO_LOGPROBS
    ) -> StepOutputs:
        """Everything so far, with these tokens and their logprobs."""
        if not (self._started or self._ended or self._prompt_logprobs or self._requeued):
            return StepOutputs(keys, token_ids, logprobs=logprobs)
        outputs = StepOutputs(
            keys,
            token_ids,
            started=tuple(self._started.items()),
            ended=tuple(self._ended),
            logprobs=logprobs,
            prompt_logprobs=tuple(self._prompt_logprobs),
            requeued=tuple(self._requeued.items()),
        )
        self._started.clear()
        self._requeued.clear()
        self._ended.clear()
        self._prompt_logprobs.clear()
        return outputs


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """One worker group at this moment."""

    running: int = 0
    """Sequences that hold a slot."""
    total_blocks: int = 0
    """K/V blocks of its pool."""
    free_blocks: int = 0
    """K/V blocks that no running sequence holds."""
    draining: bool = False
    """It is about to leave and gets nothing new."""


@dataclass(slots=True)
class Counters:
    """Totals since the start of the process."""

    admissions: int = 0
    """Sequences that took a slot, every readmission counted."""
    preemptions: int = 0
    """Sequences put back to the queue for lack of blocks."""
    requeued: int = 0
    """Sequences put back to the queue because their worker was lost or drained."""
    prefix_queries: int = 0
    """Prompt tokens of sequences admitted for the first time."""
    prefix_hits: int = 0
    """How many of them were found in the prefix cache."""
    scheduled_tokens: int = 0
    """Tokens put into plans, those computed again included."""
    sampled_tokens: int = 0
    """Sampled tokens that their sequences took."""
    stale_rows: int = 0
    """Sampled tokens dropped because their sequence had left its slot."""
    failed_rows: int = 0
    """Requests ended because their logits had no finite maximum."""
    quarantined: int = 0
    """Requests ended because workers kept being lost with them."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the core is."""

    queued: int
    """Sequences that wait for admission."""
    groups: Mapping[int, GroupLoad]
    """By number, the worker groups that are there."""
    counters: Counters
