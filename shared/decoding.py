"""What is told where another process sends what can't be decoded. Knows no message.

gRPC's client for asyncio raises nothing then: it hands on None in place of the message.
"""

from typing import TypeVar

from shared.errors import ProtocolError

UNDECODABLE = (
    "sends what can't be decoded: it is another version of Tandem, or another program: run the same version on both "
    "sides, and look at the address"
)
"""After who does."""

M = TypeVar("M")


def decoded(message: M | None) -> M:
    """A message that gRPC's client for asyncio gave. Raises ProtocolError where it could not decode what came."""
    if message is None:
        raise ProtocolError(f"it {UNDECODABLE}")
    return message
