"""What is told where another process sends what can't be decoded. Knows no message.

gRPC's client for asyncio raises nothing then: it hands on None in place of the message. Its server ends a call of one
request as a bug would.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from shared.errors import InvalidRequest, ProtocolError

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


def handing_on(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """A server's decoder whose DecodeError comes in place of the request: the handler can answer, it can't."""

    def call(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return error

    return call


def checked(request: M) -> M:
    """What such a decoder gave, or a stream of requests. Raises InvalidRequest where it is an error."""
    if isinstance(request, DecodeError):
        raise InvalidRequest("request", f"can't be decoded ({request}): run the same version of Tandem on both sides")
    return request
