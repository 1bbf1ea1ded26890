"""`tandem drain`: takes one worker out of service. Asks the worker itself, whatever scheduler holds it."""

import asyncio

from grpc import StatusCode, aio

from shared.dialer import Dialer
from shared.errors import TandemError, Unavailable
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.security import PLAIN, ClientSecurity
from shared.tls import explained


def drain(worker: str, timeout_s: float, security: ClientSecurity = PLAIN) -> None:
    """Returns when no scheduler holds the worker. Raises TandemError where that takes longer than `timeout_s`."""
    asyncio.run(_drain(worker, timeout_s, Dialer(security)))


async def _drain(worker: str, timeout_s: float, dialer: Dialer) -> None:
    channel = dialer.channel(worker)
    try:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        await stub.Drain(worker_pb2.DrainRequest(), timeout=timeout_s, metadata=dialer.metadata)
    except aio.AioRpcError as error:
        if error.code() is StatusCode.DEADLINE_EXCEEDED:
            raise TandemError(f"{worker} is still in use after {timeout_s:g} s; it gets nothing new") from None
        raise Unavailable(f"{worker}: {explained(error.details() or '')}") from None
    finally:
        await channel.close()
