"""A sample's logprobs on their way to its client: from the worker's bytes to tokens with text.

Owns that each token's are given out once, with the token, and those of the prompt before them. Knows nothing of calls.
"""

from collections import deque

from scheduler_svc.frontend.vocabulary import Vocabulary
from shared.errors import ProtocolError
from shared.logprobs import entry_bytes, read_entry
from shared.pb import core_pb2
from shared.pb import generation_pb2 as pb
from shared.wire import unpack

MOST_PROMPT_TOKENS = 1024
"""Of which one response tells: one of a long prompt would be larger than a message may be."""


class SampleLogprobs:
    """What came and what is still to be given out."""

    def __init__(self, submission: core_pb2.Submit, vocabulary: Vocabulary) -> None:
        sampling = submission.sampling
        self._vocabulary = vocabulary
        self._output: deque[tuple[int, bytes]] = deque()
        self._prompt: deque[tuple[int, bytes]] = deque()
        self._entry_bytes = entry_bytes(sampling.logprobs if sampling.HasField("logprobs") else None)
        self._prompt_entry_bytes = entry_bytes(sampling.prompt_logprobs)
        self._prompt_ids: list[int] = []
        """Of a prompt whose logprobs were asked for."""
        self.num_received = 0
        """Leading tokens of the prompt whose logprobs came: a core that takes over goes on after them."""
        if sampling.HasField("prompt_logprobs"):
            self._prompt_ids = unpack(submission.prompt).tolist()
            self._add_prompt(b"")  # nothing precedes the first

    @property
    def has_prompt(self) -> bool:
        """Whether tokens of the prompt are to be given out."""
        return bool(self._prompt)

    def push(self, token_id: int, entry: bytes) -> None:
        """A sampled token; no bytes where its logprobs were not asked for. Raises ProtocolError for others."""
        if not entry:
            return
        if len(entry) != self._entry_bytes:
            raise ProtocolError(f"{len(entry)} bytes of logprobs with a token that has {self._entry_bytes}")
        self._output.append((token_id, entry))

    def push_prompt(self, entries: bytes) -> None:
        """Of the next tokens of the prompt. Raises ProtocolError where there are not so many."""
        size = self._prompt_entry_bytes
        if not size or len(entries) % size or len(entries) // size > len(self._prompt_ids) - self.num_received:
            raise ProtocolError(f"{len(entries)} bytes of logprobs of a prompt that has no such tokens left")
        for start in range(0, len(entries), size):
            self._add_prompt(entries[start : start + size])

    def _add_prompt(self, entry: bytes) -> None:
        self._prompt.append((self._prompt_ids[self.num_received], entry))
        self.num_received += 1

    def take(self, count: int) -> list[pb.TokenLogprob]:
        """Of the next `count` sampled tokens; none where they were not asked for."""
        return [self._of(*self._output.popleft()) for _ in range(min(count, len(self._output)))]

    def take_prompt(self) -> list[pb.TokenLogprob]:
        """Of the prompt's next tokens, not all of them where they are many."""
        return [self._of(*self._prompt.popleft()) for _ in range(min(MOST_PROMPT_TOKENS, len(self._prompt)))]

    def _of(self, token_id: int, data: bytes) -> pb.TokenLogprob:
        if not data:
            return self._token(token_id)
        entry = read_entry(data)
        message = self._token(token_id, logprob=entry.logprob, rank=entry.rank)
        message.top_logprobs.extend(
            self._token(other, logprob=logprob, rank=rank) for rank, (other, logprob) in enumerate(entry.top, 1)
        )
        return message

    def _token(self, token_id: int, logprob: float | None = None, rank: int = 0) -> pb.TokenLogprob:
        data = self._vocabulary.token_bytes(token_id)
        text = data.decode(errors="replace")
        return pb.TokenLogprob(token_id=token_id, text=text, bytes=data, logprob=logprob, rank=rank)
