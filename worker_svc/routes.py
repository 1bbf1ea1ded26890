"""Which network interface leads to an address, asked of Linux by rtnetlink(7) as `ip route get` does; and whether
somebody listens there. Knows nothing of nodes.
"""

import asyncio
import socket
import struct

_NETLINK_ROUTE = 0
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ROUTE = struct.Struct("=BBBBBBBBI")  # family, bits of the destination, and what is not asked for
_ATTRIBUTE = struct.Struct("=HH")  # length, type
_GET_ROUTE, _NEW_ROUTE, _REQUEST = 26, 24, 1
_DESTINATION, _INTERFACE = 1, 4


def interface_to(host: str) -> str:
    """Its name; `host` is an IPv4 or IPv6 address. Raises OSError where there is no way."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    packed = socket.inet_pton(family, host.partition("%")[0])
    body = _ROUTE.pack(family, 8 * len(packed), *[0] * 7)
    body += _ATTRIBUTE.pack(_ATTRIBUTE.size + len(packed), _DESTINATION) + packed
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_ROUTE) as kernel:
        kernel.send(_HEADER.pack(_HEADER.size + len(body), _GET_ROUTE, _REQUEST, 1, 0) + body)
        return socket.if_indextoname(_interface(kernel.recv(1 << 16), host))


async def why_no_answer(host: str, port: int, patience_s: float) -> str | None:
    """Why nobody answers there; None: somebody listens. Ranks would go on trying without a word, for ever."""
    try:
        async with asyncio.timeout(patience_s):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        return f"does not answer within {patience_s:g} s"
    except OSError as error:
        return f"can't be reached ({error.strerror})"
    writer.close()
    return None


def _interface(answer: bytes, host: str) -> int:
    if _HEADER.unpack_from(answer)[1] == _NEW_ROUTE:
        place = _HEADER.size + _ROUTE.size
        while place < len(answer):
            length, kind = _ATTRIBUTE.unpack_from(answer, place)
            if kind == _INTERFACE:
                return int(struct.unpack_from("=I", answer, place + _ATTRIBUTE.size)[0])
            place += length + -length % 4
    raise OSError(f"no route to {host}")
