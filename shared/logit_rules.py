"""What a sequence does to its logits before temperature and filters, as a plain value. Knows no tensor and no wire."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogitRules:
    """Applied in the order of the fields. Resolved and checked: no field is optional."""

    allowed: bytes = b""
    """Bit v % 8 of byte v // 8 is set if token v may be sampled; empty: all may."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences that the output may not contain: the last token of one is suppressed after those before it."""
    bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit), each token once."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or output, multiplies negative ones (Keskar et al. 2019)."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token in the output."""

    @property
    def looks_back(self) -> bool:
        """Whether what it does depends on the tokens so far."""
        penalties = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return penalties != (1.0, 0.0, 0.0) or any(len(word) > 1 for word in self.bad_words)

    @property
    def num_bytes(self) -> int:
        """What its lists take on the wire."""
        words = sum(4 + 4 * len(word) for word in self.bad_words)
        return len(self.allowed) + words + 8 * len(self.bias)


NO_RULES = LogitRules()
