"""The parent's eye on its children: one that lives but no longer turns is killed, so that it is started again.

A stopped or blocked process still holds its sockets, and the kernel accepts connections for it: only messages tell.
Patience comes in two halves: where the whole host was stopped for a while, the first is over before the child could
say a word, and the second is its own.
"""

import asyncio
from collections.abc import Callable

import structlog
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.framing import read_message

PAUSE_S = 0.5

_log = structlog.get_logger(__name__)


async def watch_core(socket_path: str, timeout_s: float, kill: Callable[[], None]) -> None:
    """For ever. Listens as a frontend does: the core tells its state twice a second."""
    while True:
        try:
            reader, writer = await asyncio.open_unix_connection(socket_path)
            try:
                await _until_silent(reader, timeout_s)
            finally:
                writer.close()
        except TimeoutError:
            _log.warning("the core is silent and is killed", seconds=timeout_s)
            kill()
        except OSError:
            pass  # it starts
        await asyncio.sleep(PAUSE_S)


async def _until_silent(reader: asyncio.StreamReader, timeout_s: float) -> None:
    """Raises TimeoutError after silence; returns when the core is gone."""
    while True:
        reading = asyncio.ensure_future(read_message(reader))
        try:
            await asyncio.wait({reading}, timeout=timeout_s / 2)
            await asyncio.wait({reading}, timeout=timeout_s / 2)
            if not reading.done():
                raise TimeoutError
            if reading.result() is None:
                return
        finally:
            reading.cancel()


async def watch_frontend(endpoint: str, timeout_s: float, kill: Callable[[], None]) -> None:
    """For ever. Asks the frontend's health service on the socket of its own."""
    async with aio.insecure_channel(endpoint, options=[("grpc.max_reconnect_backoff_ms", 500)]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            if await _is_silent(stub, timeout_s / 2) and await _is_silent(stub, timeout_s / 2):
                _log.warning("a frontend does not answer and is killed", endpoint=endpoint, seconds=timeout_s)
                kill()
            await asyncio.sleep(PAUSE_S)


async def _is_silent(stub: "health_pb2_grpc.HealthStub", timeout_s: float) -> bool:
    """Whether it takes a call and does not answer; one that is not there is not silent."""
    try:
        await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=timeout_s)
    except aio.AioRpcError as error:
        return error.code() is StatusCode.DEADLINE_EXCEEDED
    return False
