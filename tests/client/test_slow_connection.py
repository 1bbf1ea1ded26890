"""A server that is far away, or too busy to answer at once, is reached all the same."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from tandem import Client
from tests.client.conftest import Server

HANDSHAKE_S = 0.5
"""Of a TLS connection across an ocean."""


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def slow(server: Server) -> Iterator[str]:
    """An endpoint that answers a new connection late, and then as fast as the server."""
    host, _, port = server.endpoint.rpartition(":")
    pipes: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                client, _ = listener.accept()
                time.sleep(HANDSHAKE_S)
                upstream = socket.create_connection((host, int(port)))
                pipes.extend((client, upstream))
                for pair in ((client, upstream), (upstream, client)):
                    threading.Thread(target=_forward, args=pair, daemon=True).start()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    for pipe in pipes:
        pipe.close()


def test_a_slow_handshake_is_waited_for(slow: str) -> None:
    with Client(slow, connections=1) as client:
        assert client.model_info().vocabulary_size == 512
