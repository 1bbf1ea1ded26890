"""`tandem drain`: takes one worker out of service. Asks the worker itself, whatever scheduler holds it."""

import asyncio

from grpc import StatusCode, aio

from shared.errors import TandemError, Unavailable
from shared.pb import worker_pb2, worker_pb2_grpc
from shared.rpc import make_channel


def drain(worker: str, timeout_s: float) -> None:
    """Returns when no scheduler holds the worker. Raises TandemError where that takes longer than `timeout_s`."""
    asyncio.run(_drain(worker, timeout_s))


async def _drain(worker: str, timeout_s: float) -> None:
    channel = make_channel(worker)
    try:
        await worker_pb2_grpc.WorkerServiceStub(channel).Drain(worker_pb2.DrainRequest(), timeout=timeout_s)
    except aio.AioRpcError as error:
        if error.code() is StatusCode.DEADLINE_EXCEEDED:
            raise TandemError(f"{worker} is still in use after {timeout_s:g} s; it gets nothing new") from None
        raise Unavailable(f"{worker}: {error.details()}") from None
    finally:
        await channel.close()
