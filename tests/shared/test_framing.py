"""The frame: any sequence of messages arrives as sent, however the bytes are cut; broken peers are named."""

import asyncio
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import framing
from shared.framing import FramingError, read_message, write_message


def _frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_messages_arrive_as_sent_however_the_stream_is_cut(payloads: list[bytes], size: int) -> None:
    async def run() -> None:
        reader = asyncio.StreamReader()
        stream = b"".join(map(_frame, payloads))

        async def feed() -> None:
            for start in range(0, len(stream), size):
                reader.feed_data(stream[start : start + size])
                await asyncio.sleep(0)
            reader.feed_eof()

        feeding = asyncio.ensure_future(feed())
        for payload in payloads:
            assert await read_message(reader) == payload
        assert await read_message(reader) is None
        await feeding

    asyncio.run(run())


@pytest.mark.parametrize("stream", [b"\x05\x00", b"\x05\x00\x00\x00ab", b"\x05\x00\x00\x00"])
def test_a_peer_that_closes_inside_a_message_is_an_error(stream: bytes) -> None:
    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(stream)
        reader.feed_eof()
        with pytest.raises(FramingError, match="inside a message"):
            await read_message(reader)

    asyncio.run(run())


def test_an_announced_length_above_the_bound_is_refused_before_it_is_read() -> None:
    async def run() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(struct.pack("<I", framing.MAX_MESSAGE_BYTES + 1))
        with pytest.raises(FramingError, match="at most"):
            await read_message(reader)

    asyncio.run(run())


def test_write_frames_and_a_peer_that_does_not_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_BACKLOG_BYTES", 1 << 20)

    async def run() -> None:
        here, there = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=here)
        write_message(writer, b"hello")
        assert there.recv(100) == _frame(b"hello")
        with pytest.raises(FramingError, match="doesn't read"):
            for _ in range(100):
                write_message(writer, bytes(1 << 17))
        writer.transport.abort()
        there.close()

    asyncio.run(run())
