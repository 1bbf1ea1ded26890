"""Messages on a byte stream between two processes of one pod: each has its length before it.

Owns the frame (uint32 little-endian length, then that many bytes) and its bounds. Knows nothing of what is inside.
"""

import asyncio
import struct

MAX_MESSAGE_BYTES = 64 << 20
MAX_BACKLOG_BYTES = 64 << 20
"""Most bytes that may wait for a peer that doesn't read."""

_LENGTH = struct.Struct("<I")


class FramingError(ConnectionError):
    """The peer broke the protocol or doesn't read: the connection must be closed."""


async def read_message(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None if the peer closed between two of them.

    Raises FramingError if the peer closed inside a message or announced one above MAX_MESSAGE_BYTES, and OSError
    if the connection broke.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise FramingError(f"a message of {length} bytes was announced; at most {MAX_MESSAGE_BYTES} are allowed")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == _LENGTH.size:
            return None
        raise FramingError("the peer closed the connection inside a message") from None


def write_message(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Hands one message to the transport and never waits.

    Raises FramingError if the message is above MAX_MESSAGE_BYTES, or if it would make the backlog of a peer that
    doesn't read exceed MAX_BACKLOG_BYTES; nothing is written then.
    """
    if len(payload) > MAX_MESSAGE_BYTES:
        raise FramingError(f"a message of {len(payload)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
    backlog = writer.transport.get_write_buffer_size()
    if backlog + len(payload) > MAX_BACKLOG_BYTES:
        raise FramingError(f"the peer doesn't read: {backlog} bytes wait for it")
    writer.write(_LENGTH.pack(len(payload)) + payload)
