"""`tandem drain`: takes one worker out of service. Asks the worker itself, whatever scheduler holds it."""

import asyncio

from grpc import StatusCode, aio

from shared.decoding import decoded
from shared.dialer import Dialer
from shared.errors import ProtocolError, StartupError, TandemError, Unavailable
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.resolve import check_targets, is_name
from shared.security import PLAIN, ClientSecurity
from shared.tls import explained


def drain(worker: str, timeout_s: float, security: ClientSecurity = PLAIN) -> None:
    """Returns when no scheduler holds the worker. Raises TandemError where that takes longer than `timeout_s`, or where
    there is none at host:port; StartupError where `worker` is not the address of one."""
    if "," in worker or is_name(worker):
        raise StartupError(f"{worker}: one worker at a time, as host:port, is needed")
    check_targets("tandem drain", [worker])
    asyncio.run(_drain(worker, timeout_s, Dialer(security)))


async def _drain(worker: str, timeout_s: float, dialer: Dialer) -> None:
    channel = dialer.channel(worker)
    try:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        decoded(await stub.Drain(worker_pb2.DrainRequest(), timeout=timeout_s, metadata=dialer.metadata))
    except aio.AioRpcError as error:
        if error.code() is StatusCode.DEADLINE_EXCEEDED:
            raise TandemError(f"{worker} is still in use after {timeout_s:g} s; it gets nothing new") from None
        raise Unavailable(f"{worker}: {_reason(error, dialer.security)}") from None
    except ProtocolError as error:
        raise ProtocolError(f"{worker}: {error}") from None
    finally:
        await channel.close()


def _reason(error: aio.AioRpcError, security: ClientSecurity) -> str:
    details = error.details() or ""
    if error.code() is StatusCode.UNIMPLEMENTED:
        return "this is no worker: give an address of the scheduler's --workers"
    told = explained(details, security)
    if error.code() is StatusCode.UNAVAILABLE and told == details:
        return f"no worker can be reached there: is it one of the scheduler's --workers, and does it run? ({details})"
    return told
