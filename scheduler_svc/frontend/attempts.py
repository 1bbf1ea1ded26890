"""Which requests were last told that nobody serves, or another scheduler.

Who asks again by the same id means the same request.
"""

from scheduler_svc.frontend.request_counts import STANDBY, outcome_of
from shared.errors import Unavailable

MOST = 4096
"""Ids that are remembered; one that is forgotten is told of once more."""
NOT_SERVED = (outcome_of(Unavailable("")), STANDBY)


class Attempts:
    """Of one frontend's requests. Ids may be of any length before they are checked, so it keeps their hashes."""

    def __init__(self) -> None:
        self._not_served: dict[int, str] = {}

    def is_repeated(self, request_id: str, outcome: str, completion_tokens: int) -> bool:
        """A call has ended. Whether the one before it ended alike, and neither gave anything since."""
        key = hash(request_id)
        before = self._not_served.pop(key, None)
        if outcome not in NOT_SERVED:
            return False
        self._not_served[key] = outcome
        if len(self._not_served) > MOST:
            del self._not_served[next(iter(self._not_served))]
        return before == outcome and not completion_tokens
