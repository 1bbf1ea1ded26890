"""Who asks, where clients take turns. Tells them apart, knows nobody: what a client gives as proof stays out of it."""

from hashlib import blake2b
from typing import Any

PEER, TOKEN = "peer", "token"
_AUTHORIZATION = "authorization"


def client_of(context: Any, fair_by: str | None) -> str:
    """A name of the call's client, equal on all frontends; calls without what `fair_by` asks for are one client.

    A digest, so that tokens are nowhere but in the call itself.
    """
    if fair_by is None:
        return ""
    if fair_by == PEER:
        return _digest(context.peer().rpartition(":")[0])  # without the port: connections are not clients
    key = _AUTHORIZATION if fair_by == TOKEN else fair_by
    return _digest(next((value for name, value in context.invocation_metadata() or () if name == key), ""))


def _digest(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else value
    return blake2b(data, digest_size=16).hexdigest() if data else ""
