"""Logit rules and logprobs as their definitions say, in numpy and float64, one token at a time."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.logit_rules import LogitRules
from shared.logprobs import TokenEntry

Logits = NDArray[np.float64]


def adjusted(logits: Logits, prompt: Sequence[int], output: Sequence[int], rules: LogitRules) -> Logits:
    """Logits of the token after `output`, in the order: allowed, bad words, bias, repetition, frequency, presence."""
    values = logits.copy()
    for token in range(len(values)):
        if rules.allowed and not rules.allowed[token // 8] >> token % 8 & 1:
            values[token] = -np.inf
    for word in rules.bad_words:
        *before, last = word
        if len(output) >= len(before) and list(output[len(output) - len(before) :]) == before:
            values[last] = -np.inf
    for token, value in rules.bias:
        values[token] += np.float32(value)
    repetition, frequency, presence = (
        float(np.float32(value))
        for value in (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty)
    )
    for token in {*prompt, *output}:
        values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
    for token in set(output):
        values[token] -= frequency * list(output).count(token) + presence
    return values


def entry_of(logits: Logits, token: int, num_top: int) -> TokenEntry:
    """What is to be told of a token."""
    logprobs = logits - np.logaddexp.reduce(logits)
    order = np.argsort(-logprobs, kind="stable")
    rank = 1 + int((logprobs > logprobs[token]).sum())
    return TokenEntry(
        float(logprobs[token]), rank, tuple((int(best), float(logprobs[best])) for best in order[:num_top])
    )


def assert_near(entry: TokenEntry, expected: TokenEntry) -> None:
    """Ids and ranks exactly, logprobs as float32 holds them."""
    assert entry.rank == expected.rank
    assert [token for token, _ in entry.top] == [token for token, _ in expected.top]
    values, wanted = ([one.logprob, *(value for _, value in one.top)] for one in (entry, expected))
    np.testing.assert_allclose(values, wanted, rtol=2e-6, atol=1e-7)
