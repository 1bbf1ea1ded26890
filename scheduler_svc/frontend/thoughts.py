"""Thoughts of models that think before they answer: where a prompt has opened one, a grammar begins after its end.

Knows the marks of Qwen3's chat templates, as tokens of one model. Knows nothing of requests, or of what grammars allow.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from scheduler_svc.frontend.matcher import Mask, Matcher
from scheduler_svc.frontend.vocabulary import Vocabulary


class Thoughts:
    """The marks of a model's thoughts, if it has such tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        """`vocabulary` is the tokenizer's."""
        self._vocabulary = vocabulary
        self._begin = tokenizer.token_to_id("<think>")
        self.end: int | None = tokenizer.token_to_id("</think>")
        """The token that ends one; None for a model that has none."""

    def is_open_after(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt ends with the opening mark, white space aside. One further back may be part of what is
        talked of."""
        if self.end is None:
            return False
        for token_id in reversed(prompt):
            if not self._vocabulary.token_bytes(token_id).isspace():
                return token_id == self._begin
        return False


class AfterThought:
    """A matcher that begins after the token that ends the thought; before it anything but an end may come."""

    def __init__(self, matcher: Matcher, end: int, free: Mask) -> None:
        self._matcher = matcher
        self._end = end
        self._free = free
        self._is_over = False

    def copy(self) -> "AfterThought":
        """Another one at the same place."""
        copy = AfterThought(self._matcher.copy(), self._end, self._free)
        copy._is_over = self._is_over
        return copy

    def consume(self, token_id: int) -> None:
        """See Matcher."""
        if self._is_over:
            self._matcher.consume(token_id)
        else:
            self._is_over = token_id == self._end

    def allowed(self) -> Mask:
        """See Matcher."""
        return self._matcher.allowed() if self._is_over else self._free
