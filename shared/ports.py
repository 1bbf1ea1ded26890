"""Addresses of this machine, before a server binds them."""

import errno
import socket
from pathlib import Path
from urllib.parse import quote

from shared.errors import StartupError

LOOPBACK = "127.0.0.1"


def address(host: str, port: int) -> str:
    """host:port as gRPC reads it: an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unix_endpoint(path: Path) -> str:
    """A Unix socket as gRPC reads it: as a URI. It takes a comma for the end of one address."""
    return f"unix:{quote(str(path))}"


def require_free(host: str, port: int, host_flag: str = "--host", port_flag: str = "--port") -> None:
    """Raises StartupError if something listens there: with SO_REUSEPORT a second server would silently share it.

    The flags are those that the caller's user may change.
    """
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT are no server
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            no_such_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            flag = host_flag if no_such_host else port_flag
            where = address(host, port)
            raise StartupError(f"can't listen on {where} ({error.strerror}): choose another {flag}") from None


def find_free(host: str) -> int:
    """A port that was free a moment ago."""
    with _socket(host) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
