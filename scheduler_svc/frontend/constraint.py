"""One sample's grammar: which tokens may come next, worked out in a thread after each token.

Owns the matcher, so a worker's or the core's loss needs no replay: the last mask is here. Knows nothing of the core.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import structlog

from scheduler_svc.frontend.matcher import GrammarError, Mask, Matcher
from scheduler_svc.frontend.thoughts import AfterThought
from shared.errors import InvalidRequest, RequestFailed, TandemError

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Tokens that would end the output are not allowed before it has so many tokens.

    A grammar that allows nothing else comes first: it ends the output all the same.
    """

    count: int
    stops: Mask
    """The tokens that end the output."""

    @classmethod
    def of(cls, count: int, stop_token_ids: Sequence[int], vocabulary_size: int) -> "MinTokens":
        """`stop_token_ids` are within the vocabulary."""
        stops = np.zeros(-(-vocabulary_size // 8) * 8, dtype=np.uint8)
        stops[list(stop_token_ids)] = 1
        return cls(count, np.packbits(stops, bitorder="little"))

    def applied(self, mask: Mask, num_tokens: int) -> Mask:
        """The mask for the token after `num_tokens` of output."""
        if num_tokens >= self.count:
            return mask
        later = mask & ~self.stops
        return later if later.any() else mask


class Constraint:
    """From the tokens of a sample to the masks for its next ones. One token at a time."""

    def __init__(self, field: str, matcher: Matcher | AfterThought, min_tokens: MinTokens, threads: Executor) -> None:
        """`field` is the request's, for messages."""
        self._field = field
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._threads = threads
        self._num_tokens = 0
        self._ready: Callable[[], None] = lambda: None
        self._failed: Callable[[TandemError], None] = lambda error: None
        self.mask: bytes | None = None
        """Tokens allowed next; None while that is being worked out."""

    async def begin(self, output: Sequence[int]) -> None:
        """The mask after output that was given. Raises InvalidRequest where the grammar does not allow that output."""
        self.mask = await asyncio.get_running_loop().run_in_executor(self._threads, self._after_given, output)

    def copy(self) -> "Constraint":
        """For another sample that has begun in the same way."""
        copy = Constraint(self._field, self._matcher.copy(), self._min_tokens, self._threads)
        copy.mask, copy._num_tokens = self.mask, self._num_tokens
        return copy

    def watch(self, ready: Callable[[], None], failed: Callable[[TandemError], None]) -> None:
        """Who is told of each new mask, or that there is none: the grammar is at fault."""
        self._ready, self._failed = ready, failed

    def push(self, token_id: int) -> None:
        """The sample's next token. `ready` or `failed` follows."""
        mask, self.mask = self.mask, None
        if mask is None or not mask[token_id // 8] >> token_id % 8 & 1:
            self._failed(RequestFailed(f"token {token_id} was sampled, which the constraint does not allow"))
            return
        working = asyncio.get_running_loop().run_in_executor(self._threads, self._after, token_id)
        working.add_done_callback(self._done)

    def _done(self, working: "asyncio.Future[bytes]") -> None:
        if working.cancelled():
            return  # the process ends
        error = working.exception()
        if error is None:
            self.mask = working.result()
            self._ready()
        elif isinstance(error, TandemError):
            self._failed(error)
        else:
            _log.error("a mask failed by a bug", exc_info=error)
            self._failed(RequestFailed("internal error; the scheduler's log has the details"))

    def _after_given(self, output: Sequence[int]) -> bytes:
        for index, token_id in enumerate(output):
            try:
                self._matcher.consume(token_id)
            except GrammarError as error:
                raise InvalidRequest(
                    f"output_token_ids[{index}]", f"{self._field} does not allow it: {error}"
                ) from None
        self._num_tokens = len(output)
        return self._allowed()

    def _after(self, token_id: int) -> bytes:
        self._num_tokens += 1
        try:
            self._matcher.consume(token_id)
        except GrammarError as error:
            raise InvalidRequest(self._field, f"stopped at output token {self._num_tokens}: {error}") from None
        return self._allowed()

    def _allowed(self) -> bytes:
        try:
            mask = self._matcher.allowed()
        except GrammarError as error:
            raise InvalidRequest(self._field, f"stopped after {self._num_tokens} output tokens: {error}") from None
        return self._min_tokens.applied(mask, self._num_tokens).tobytes()
