"""Finds stop strings in text that arrives in pieces, and tells how much of it could still become one.

Knows nothing of tokens. An Aho-Corasick automaton (Aho, Corasick 1975): constant amortised time per character,
whatever the number and length of the strings; the depth of its state is what must be held back.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The automaton of a request's stop strings, shared by its samples. A state is an index; 0 is the start."""

    edges: list[dict[str, int]]
    """From a state, by a character, to the next."""
    fallback: list[int]
    """State of the longest proper suffix that begins a stop string."""
    matched: list[str | None]
    """The longest stop string that ends in this state."""
    held: list[int]
    """Characters before this state that may still become a stop string."""

    @classmethod
    def build(cls, stops: Iterable[str]) -> "StopStrings":
        """Each of `stops` is a non-empty string."""
        automaton = cls([{}], [0], [None], [0])
        depths = [0]
        for stop in stops:
            automaton._insert(stop, depths)
        automaton._link(depths)
        return automaton

    def __bool__(self) -> bool:
        """Whether there is any stop string."""
        return len(self.edges) > 1

    def _insert(self, stop: str, depths: list[int]) -> None:
        state = 0
        for character in stop:
            if character not in self.edges[state]:
                self.edges[state][character] = len(self.edges)
                self.edges.append({})
                self.fallback.append(0)
                self.matched.append(None)
                self.held.append(0)
                depths.append(depths[state] + 1)
            state = self.edges[state][character]
        self.matched[state] = stop

    def _link(self, depths: list[int]) -> None:
        """Breadth first: a state's fallback is shorter, so it is linked before."""
        queue = deque(self.edges[0].values())
        while queue:
            state = queue.popleft()
            fallback = self.fallback[state]
            self.matched[state] = self.matched[state] or self.matched[fallback]
            self.held[state] = depths[state] if self.edges[state] else self.held[fallback]
            for character, target in self.edges[state].items():
                self.fallback[target] = self.step(fallback, character)
                queue.append(target)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while character not in self.edges[state]:
            if state == 0:
                return 0
            state = self.fallback[state]
        return self.edges[state][character]
