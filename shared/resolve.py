"""From endpoints to addresses: host:port as it stands, dns:///name:port as one for each record of the name.

So each pod behind a headless Service of Kubernetes is a worker group of its own. Knows nothing of connections.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from shared.errors import StartupError
from shared.ports import address
from shared.security import ClientSecurity

SCHEME = "dns:///"

_log = structlog.get_logger(__name__)


def is_name(target: str) -> bool:
    """Whether it stands for as many as its name has addresses, now and later."""
    return target.startswith(SCHEME)


def check_targets(flag: str, targets: Sequence[str]) -> None:
    """Raises StartupError, naming the flag, for what is neither, and for what is given twice."""
    for target in targets:
        host, _, port = target.removeprefix(SCHEME).rpartition(":")
        if not host or "/" in host or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise StartupError(f"{flag} {target}: host:port or dns:///name:port is needed")
        if targets.count(target) > 1:
            raise StartupError(f"{flag} {target}: given twice")


def host_of(target: str) -> str:
    """Its host alone."""
    return target.removeprefix(SCHEME).rpartition(":")[0].strip("[]")


def named(security: ClientSecurity, target: str) -> ClientSecurity:
    """A certificate is for the name, not for the addresses that are dialled."""
    if not is_name(target) or security.tls_ca is None or security.tls_server_name is not None:
        return security
    return replace(security, tls_server_name=host_of(target))


def resolve_now(target: str) -> list[str]:
    """The addresses of a name, as host:port. Raises OSError where it has none, or nobody tells.

    Of one family: a pod that has an address of each would be two groups.
    """
    host, port = host_of(target), target.rpartition(":")[2]
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError(errno.EINVAL, f"{host!r} can't be a name: a part of it is empty or too long") from None
    families = {family for family, *_ in found}
    chosen = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({address(str(where[0]), int(port)) for family, *_, where in found if family == chosen})


async def resolve(target: str) -> list[str]:
    """The same, in a thread."""
    return await asyncio.to_thread(resolve_now, target)


async def follow(target: str, interval_s: float, found: Callable[[list[str]], None]) -> None:
    """Tells the addresses of a name, every `interval_s` seconds for ever.

    One that can't be resolved for a while changes nothing: its addresses stay as they were.
    """
    reported = ""
    while True:
        try:
            found(await resolve(target))
            reported = ""
        except OSError as error:
            if str(error) != reported:
                _log.warning("no addresses", name=target, reason=str(error))
            reported = str(error)
        await asyncio.sleep(interval_s)
