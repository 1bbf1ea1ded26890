"""Where servers are: endpoints as they were given, and of each dns:///name:port the addresses that it has now.

gRPC itself would stay with the first address that answers, which may be a standby's. Knows nothing of connections.
"""

import threading
import time
from collections.abc import Sequence

from shared.resolve import is_name, resolve_now

AFTER_FAILURE_S = 1.0
"""Names are looked up again after a failure, but not more often than this."""
OLD_S = 10.0
"""Without one they are looked up again when they are used and this old."""


class AddressBook:
    """Safe to share between threads."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        """Looks names up, which may take a moment."""
        self._endpoints = endpoints
        self._found = {name: [name] for name in endpoints if is_name(name)}
        """Addresses by name; the name itself, gRPC's matter, where it has none."""
        self._looked_at = time.monotonic()
        self._look()

    @property
    def has_names(self) -> bool:
        """Whether addresses may change."""
        return bool(self._found)

    @property
    def addresses(self) -> tuple[str, ...]:
        """As of the last look, each once."""
        self.look_again(OLD_S)
        return tuple(dict.fromkeys(at for given in self._endpoints for at in self._found.get(given, [given])))

    def look_again(self, after_s: float = AFTER_FAILURE_S) -> None:
        """In the background, if the last look is at least so long ago."""
        if self._found and time.monotonic() - self._looked_at >= after_s:
            self._looked_at = time.monotonic()
            threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        for name in self._found:
            try:
                self._found[name] = resolve_now(name)
            except (OSError, ValueError):
                continue  # its addresses stay as they were
