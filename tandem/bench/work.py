"""Requests to offer: random prompts, lengths, arrivals. The same seed makes the same work."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

TEMPERATURE = 0.6
TOKEN_IDS = 10_000
"""Prompts are of ids below; a smaller vocabulary folds them."""


@dataclass(frozen=True, slots=True)
class Item:
    """One request."""

    prompt: list[int]
    output_length: int
    arrival: float = 0.0
    """Seconds after the start."""


def random_items(
    count: int, prompt_length: int, output_length: int, seed: int = 1, range_ratio: float = 0.0
) -> list[Item]:
    """`count` requests of random tokens, with lengths uniform from (1 - range_ratio) to (1 + range_ratio) of these."""
    rng = random.Random(seed)

    def length(mean: int) -> int:
        if not range_ratio:
            return mean
        return rng.randint(max(1, round(mean * (1 - range_ratio))), round(mean * (1 + range_ratio)))

    return [
        Item([rng.randint(0, TOKEN_IDS) for _ in range(length(prompt_length))], length(output_length))
        for _ in range(count)
    ]


def poisson_arrivals(items: Sequence[Item], rate: float, seed: int = 2) -> list[Item]:
    """The same requests at random times, `rate` a second on average, each independent of the others."""
    rng, now, arriving = random.Random(seed), 0.0, []
    for item in items:
        now += rng.expovariate(rate)
        arriving.append(replace(item, arrival=now))
    return arriving
