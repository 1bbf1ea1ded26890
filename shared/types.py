"""The nouns of the plan log, as plain values: what the core decides and what a worker folds.

Knows nothing of gRPC or protobuf (shared.wire converts at the edge) and nothing of torch.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.logit_rules import NO_RULES, LogitRules

IntArray: TypeAlias = NDArray[np.int32]

DEPTH_LIMIT = 4
"""Most plans of one worker group without a result."""


def ints(*shape: int) -> IntArray:
    """An uninitialised int32 array."""
    return np.empty(shape, dtype=np.int32)


NO_INTS = ints(0)
NO_PAIRS = ints(0, 2)
NO_TRIPLES = ints(0, 3)


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How a worker samples one sequence. Resolved and checked: no field is optional."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Keeps the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keeps the most likely tokens up to this probability, the one that crosses it included."""
    min_p: float = 0.0
    """Keeps tokens at least this fraction as likely as the most likely one."""
    seed: int = 0
    """Noise key of the sample, 64 bits, unsigned."""
    min_tokens: int = 0
    """Output tokens before `suppressed_ids` may be sampled."""
    suppressed_ids: tuple[int, ...] = ()
    """Ids that would end the sequence."""
    rules: LogitRules = NO_RULES
    """What changes the logits before temperature and filters."""
    logprobs: int | None = None
    """Most likely tokens to return with each sampled one, with their logprobs; None: no logprobs at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence takes a slot of a worker's batch state; whatever the slot held is gone."""

    slot: int
    prompt_length: int
    cached_length: int
    """Tokens whose K/V is already in `block_ids`: the slot's first row starts at this position."""
    known_length: int
    """Tokens known at admission, prompt and output: the slot's first sampling row ends at this position."""
    block_ids: IntArray
    """[num_cached_blocks]"""
    sampling: RowSampling
    cached_ids: IntArray = field(default_factory=lambda: NO_INTS)
    """[cached_length] where the rules look back at tokens, else empty: rows tell all other tokens."""
    prompt_logprobs_from: int = 0
    """First position of the prompt whose logprobs are to be returned, if any are: at least 1."""


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that a slot may sample in one plan."""

    slot: int
    allowed: bytes
    """Bit v % 8 of byte v // 8 is set if token v is allowed."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One entry of the plan log: what changed since the previous one, and the rows to compute.

    A worker applies `admitted`, `grown`, `masks` and `zeroed`, in this order, then computes `rows`.
    Without rows it is a heartbeat.
    """

    epoch: int
    step_id: int
    """1, 2, 3 ... within the epoch."""
    admitted: tuple[Admission, ...] = ()
    grown: IntArray = field(default_factory=lambda: NO_PAIRS)
    """[num_grown, 2]: (slot, block id), appended to the slot's block table in this order."""
    rows: IntArray = field(default_factory=lambda: NO_TRIPLES)
    """[num_rows, 3]: (slot, token count, known ids). A row of one token and no known id takes the slot's last
    sampled token; every other row has all its ids known."""
    token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    """[sum of known ids]: the rows' known token ids in row order."""
    masks: tuple[TokenMask, ...] = ()
    zeroed: IntArray = field(default_factory=lambda: NO_INTS)
    """[num_zeroed]: block ids to fill with zeros before the rows: a step that gave NaN wrote them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one plan gave."""

    epoch: int
    step_id: int
    token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    """[num_sampling_rows], in row order."""
    failed_rows: IntArray = field(default_factory=lambda: NO_INTS)
    """Indices into `token_ids` of rows whose logits had no finite maximum."""
    draining: bool = False
    """The worker is shutting down: schedule nothing new there."""
    step_time_us: int = 0
    logprobs: bytes = b""
    """An entry (shared.logprobs) for each of `token_ids` whose sequence asked for logprobs."""
    prompt_logprobs: bytes = b""
    """Entries of the rows' prompt tokens from `prompt_logprobs_from` on, in row order."""


class FinishReason(Enum):
    """Why a sequence ended normally."""

    STOP_TOKEN = "stop token"
    """A stop or end-of-sequence token was sampled."""
    LENGTH = "length"
    """max_tokens or the context limit."""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker group serves, as it answered Describe."""

    fingerprint: str
    model_name: str
    dtype: str
    block_size: int
    num_blocks: int
    max_model_length: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    tensor_parallel_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    version: str
    attention: str
    draining: bool = False
    worker: int = 0
    """Its id, random and new with each start; 0: it has told none."""
