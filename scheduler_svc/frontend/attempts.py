"""Which requests were last told that nobody serves: who asks again by the same id means the same request."""

from scheduler_svc.frontend.request_counts import outcome_of
from shared.errors import Unavailable

MOST = 4096
"""Ids that are remembered; one that is forgotten is told of once more."""
UNAVAILABLE = outcome_of(Unavailable(""))


class Attempts:
    """Of one frontend's requests. Ids may be of any length before they are checked, so it keeps their hashes."""

    def __init__(self) -> None:
        self._unavailable: dict[int, None] = {}

    def is_repeated(self, request_id: str, outcome: str, completion_tokens: int) -> bool:
        """A call has ended. Whether the one before it ended alike, and neither gave anything since."""
        key = hash(request_id)
        was_unavailable = key in self._unavailable
        self._unavailable.pop(key, None)
        if outcome != UNAVAILABLE:
            return False
        self._unavailable[key] = None
        if len(self._unavailable) > MOST:
            del self._unavailable[next(iter(self._unavailable))]
        return was_unavailable and not completion_tokens
