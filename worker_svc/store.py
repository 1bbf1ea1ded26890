"""Where the ranks of a group over several hosts meet, as node 0 tells it. Knows neither torch nor connections."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Store:
    """A key-value store over TCP, which rank 0 serves."""

    host: str
    port: int
    epoch: str
    """Of this life of the group: a rank that a former one has left finds nobody, even at the same port."""
    nnodes: int
    listener: int | None = None
    """Handle of the bound socket that rank 0 inherits; None for the other ranks."""
