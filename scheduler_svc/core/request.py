"""What is asked for (Request) and what becomes of it (Sequence, State). Knows nothing of groups, blocks or plans."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from scheduler_svc.core.prefix import HashedBlock, Parent
from shared.logit_rules import NO_RULES, LogitRules
from shared.types import NO_INTS, IntArray, RowSampling

MOST_OUTPUT_COUNTED = 1024
"""Of a request's max_tokens, in what it costs its client: most outputs end sooner, whatever was allowed."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sequence that the caller wants generated."""

    key: int
    """The caller's own number for it, int64, never used twice."""
    request_id: str
    """Public id. (request_id, sample_index) is unique among live requests."""
    sample_index: int
    """Which of the public request's samples this is."""
    prompt: IntArray
    """[prompt_length]"""
    output: IntArray = field(default_factory=lambda: NO_INTS)
    """[num_given]: output tokens to continue after; they count for max_tokens and min_tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Keeps the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keeps the most likely tokens up to this probability."""
    min_p: float = 0.0
    """Keeps tokens at least this fraction as likely as the most likely one."""
    seed: int = 0
    """Noise key of the sample, 64 bits, unsigned."""
    rules: LogitRules = NO_RULES
    """What changes the logits before temperature and filters."""
    logprobs: int | None = None
    """Most likely tokens to tell of with each output token; None: no logprobs at all."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    prompt_logprobs_received: int = 0
    """Leading tokens of the prompt whose logprobs the caller has already."""
    max_tokens: int | None = None
    """Most output tokens; None means up to the context limit."""
    min_tokens: int = 0
    """Output tokens before a stop token can be sampled."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence, end-of-sequence tokens included."""
    cache_salt: str = ""
    """Requests with different salts never share blocks."""
    priority: int = 0
    """Smaller is more important."""
    client: str = ""
    """Who asks: clients of one priority take turns. The same for all where nobody is told apart."""
    constrained: bool = False
    """Samples only where the caller told the allowed tokens (mask_ready)."""
    again: bool = False
    """It was accepted before, by a core that is gone: a full queue does not refuse it."""

    def row_sampling(self) -> RowSampling:
        """What a worker needs of it."""
        return RowSampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            min_tokens=self.min_tokens,
            suppressed_ids=self.stop_token_ids if self.min_tokens else (),
            rules=self.rules,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class State(Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    """In the queue, without slot and blocks."""
    RUNNING = "running"
    """In a group's batch."""
    ENDED = "ended"
    """Forgotten by the core."""


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.ENDED}),
    State.RUNNING: frozenset({State.WAITING, State.ENDED}),
    State.ENDED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A bug: the sequence can't go there from where it is. Nothing changed."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A live request. What changes with every token is in its group's Batch while it runs."""

    request: Request
    arrival: int
    """Number of its submit: a client's equal priorities are served in this order, also after a preemption."""
    limit: int
    """Tokens of prompt and output at which it ends by length."""
    output: IntArray
    """[num_output]: known output when it last waited."""
    sampling: RowSampling
    """As the worker gets it."""
    stop_ids: frozenset[int]
    """The request's stop tokens."""
    state: State = State.WAITING
    turn: int = 0
    """Its place among the clients of its priority; see turns."""
    hashed: list[HashedBlock] = field(default_factory=list)
    """Digests of its leading full blocks, as far as they were needed."""
    passed: int = 0
    """Steps that admitted others past it."""
    started: bool = False
    """It was admitted once."""
    mask: bytes | None = None
    """Allowed tokens for output position `mask_position`, of a constrained sequence."""
    mask_position: int = -1
    losses: int = 0
    """Worker losses that hit it in flight since `known_at_loss`."""
    known_at_loss: int = 0
    """Tokens known when a loss last hit it."""
    prompt_logprobs_from: int = field(init=False)
    """First position of the prompt whose logprobs its caller waits for; the prompt's length where there is none."""

    # The following hold while it runs.
    group: int | None = None
    """The group that runs it."""
    slot: int = 0
    table: list[int] = field(default_factory=list)
    """Its block ids."""
    published: int = 0
    """Leading blocks that are in the prefix map, its own or others' equal ones."""
    parent: Parent = ""
    """Prefix map entry of the last of them."""
    last_chunk_step: int = 0
    """Step id of its last row with known tokens."""

    def __post_init__(self) -> None:
        request = self.request
        wanted = request.prompt_logprobs is not None
        self.prompt_logprobs_from = max(1, request.prompt_logprobs_received) if wanted else len(request.prompt)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Smaller is more important."""
        return (self.request.priority, self.turn, self.arrival)

    @property
    def cost(self) -> int:
        """Tokens that it counts for among clients, while it waits: nobody knows yet how long its output becomes."""
        return self.waiting_length + min(self.limit - self.waiting_length, MOST_OUTPUT_COUNTED)

    @property
    def waiting_length(self) -> int:
        """Its known tokens, while it waits."""
        return len(self.request.prompt) + len(self.output)

    def waiting_tokens(self) -> IntArray:
        """[known]: its known tokens, while it waits."""
        return np.concatenate((self.request.prompt, self.output)) if self.output.size else self.request.prompt

    def most_cached(self, most_told: int) -> int | None:
        """Tokens that may come from the cache, None: any number. `most_told` bounds those that its admission tells.

        A logprob comes from the row that computes the token before, so that one is computed again.
        """
        if self.prompt_logprobs_from < len(self.request.prompt):
            return min(self.prompt_logprobs_from - 1, most_told)
        return most_told if self.request.rules.looks_back else None

    def has_mask(self, known: int) -> bool:
        """Whether it may sample after `known` tokens: unconstrained, or the mask for that position is there."""
        return not self.request.constrained or self.mask_position == known - len(self.request.prompt)

    def move(self, state: State) -> None:
        """The only way to change `state`. Raises IllegalTransition."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransition(f"sequence {self.request.key}: {self.state.value} to {state.value}")
        self.state = state
