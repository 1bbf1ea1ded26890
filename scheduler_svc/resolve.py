"""From --workers to addresses: host:port as it stands, dns:///name:port as one address for each record of the name.

So each pod behind a headless Service of Kubernetes is a worker group of its own. Knows nothing of links.
"""

import asyncio
import socket

from shared.errors import StartupError
from shared.ports import address

SCHEME = "dns:///"


def is_name(target: str) -> bool:
    """Whether it stands for as many groups as its name has addresses, now and later."""
    return target.startswith(SCHEME)


def check_target(target: str) -> None:
    """Raises StartupError for what is neither."""
    host, _, port = target.removeprefix(SCHEME).rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise StartupError(f"--workers {target}: host:port or dns:///name:port is needed")


def host_of(target: str) -> str:
    """Its host alone."""
    return target.removeprefix(SCHEME).rpartition(":")[0].strip("[]")


async def resolve(target: str) -> list[str]:
    """The addresses of a name, as host:port. Raises OSError where it has none, or nobody tells.

    Of one family: a pod that has an address of each would be two groups.
    """
    port = target.rpartition(":")[2]
    found = await asyncio.to_thread(socket.getaddrinfo, host_of(target), int(port), type=socket.SOCK_STREAM)
    families = {family for family, *_ in found}
    chosen = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({address(str(where[0]), int(port)) for family, *_, where in found if family == chosen})
