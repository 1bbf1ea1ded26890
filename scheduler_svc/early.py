"""Requests that came before the core could take them: none knows yet what the worker groups can hold.

After a restart of the core process the frontends come back sooner than the workers. Knows nothing of either.
"""

from collections.abc import Iterator

from scheduler_svc.core import Request, Scheduler
from shared.errors import QueueFull, TandemError


class EarlyRequests:
    """In order of their arrival, with what their grammars have allowed meanwhile."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests: dict[int, Request] = {}
        self._masks: dict[int, tuple[int, bytes]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: int) -> bool:
        return key in self._requests

    @property
    def held(self) -> int:
        """Entries of all maps."""
        return len(self._requests) + len(self._masks)

    def add(self, request: Request) -> None:
        """Raises QueueFull, but for one that was accepted before."""
        if len(self._requests) >= self._most and not request.again:
            raise QueueFull(f"{len(self._requests)} requests wait for a worker: try again later")
        self._requests[request.key] = request

    def mask_ready(self, key: int, position: int, allowed: bytes) -> None:
        """What the request may sample first."""
        self._masks[key] = (position, allowed)

    def drop(self, key: int) -> None:
        """It is over, if it was here."""
        self._requests.pop(key, None)
        self._masks.pop(key, None)

    def keys_of(self, request_id: str) -> list[int]:
        """The keys of a public request's samples."""
        return [key for key, request in self._requests.items() if request.request_id == request_id]

    def all_keys(self) -> list[int]:
        """All of them."""
        return list(self._requests)

    def hand_over(self, core: Scheduler) -> Iterator[tuple[int, TandemError]]:
        """Submits all of them; yields who was refused, and why."""
        requests, self._requests = self._requests, {}
        masks, self._masks = self._masks, {}
        for key, request in requests.items():
            try:
                core.submit(request)
                if key in masks:
                    core.mask_ready(key, *masks[key])
            except TandemError as error:
                yield key, error
