"""Listens to the schedulers that stand before the same workers, and tells the election what they say.

Knows the wire and the clock; decides nothing.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial

import structlog
from grpc import StatusCode, aio

from scheduler_svc.claim import Claim
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.election import Election
from shared.decoding import decoded
from shared.dialer import Dialer
from shared.errors import ProtocolError
from shared.pb import peer_pb2, peer_pb2_grpc
from shared.resolve import follow, is_name, named
from shared.security import ClientSecurity
from shared.tls import explained

REDIAL_S = 0.2

_log = structlog.get_logger(__name__)


class Peers:
    """A listener at every address that --peers stands for."""

    def __init__(self, config: SchedulerConfig, election: Election, heard: Callable[[], None]) -> None:
        """`heard` is called after each event that the election was told of."""
        self._config = config
        self._election = election
        self._heard = heard
        self._dialers = {target: Dialer(named(config.peer_security, target), as_child=True) for target in config.peers}
        self._found = {target: [target] for target in config.peers if not is_name(target)}
        """Addresses by target, as last resolved."""
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        """As long as there is somebody to listen to. Raises what `heard` raises."""
        names = [target for target in self._config.peers if is_name(target)]
        async with self._tasks:
            for name in names:
                self._tasks.create_task(follow(name, self._config.resolve_interval, partial(self._resolved, name)))
            if not names:
                self._adjust()

    def _resolved(self, name: str, addresses: list[str]) -> None:
        self._found[name] = addresses
        self._adjust()

    def _adjust(self) -> None:
        wanted = {address: self._dialers[target] for target, found in self._found.items() for address in found}
        self._election.addresses(wanted, time.monotonic())
        for address in self._listeners.keys() - wanted.keys():
            self._listeners.pop(address).cancel()
        for address in wanted.keys() - self._listeners.keys():
            self._listeners[address] = self._tasks.create_task(self._listen(address, wanted[address]))
        self._heard()

    async def _listen(self, address: str, dialer: Dialer) -> None:
        reported = ""
        while True:
            channel = dialer.channel(address)
            try:
                await self._follow(address, peer_pb2_grpc.PeerServiceStub(channel))
            except (aio.AioRpcError, ProtocolError) as error:
                reason = _reason(error, dialer.security)
                if reason != reported:
                    _log.warning("no peer", endpoint=address, reason=reason)
                reported = reason
                self._election.unreachable(address, time.monotonic())
                self._heard()
            except TimeoutError:
                pass  # the election judges silence by itself
            finally:
                await channel.close()
            await asyncio.sleep(REDIAL_S)

    async def _follow(self, address: str, stub: "peer_pb2_grpc.PeerServiceAsyncStub") -> None:
        """Until the stream ends. A silent one is given up: the link may be cut, and its successor would be mute."""
        call = stub.Watch(peer_pb2.WatchPeerRequest())
        while True:
            async with asyncio.timeout(self._config.peer_timeout):
                state = decoded(await call.read())
            if not isinstance(state, peer_pb2.PeerState):
                return
            self._election.heard(address, claim_from_pb(state), time.monotonic())
            self._heard()


def _reason(error: aio.AioRpcError | ProtocolError, security: ClientSecurity) -> str:
    if isinstance(error, ProtocolError):
        return str(error)
    if error.code() is StatusCode.UNIMPLEMENTED:
        return "no scheduler answers there: --peers takes the addresses that clients reach"
    return explained(error.details() or "", security)


def claim_from_pb(state: peer_pb2.PeerState) -> Claim:
    """What a peer tells."""
    return Claim(
        state.scheduler,
        leading=state.leading,
        serving=state.serving,
        candidate=state.candidate,
        term=state.term,
        reaching=state.reaching,
    )


def claim_to_pb(claim: Claim) -> peer_pb2.PeerState:
    """To tell the peers."""
    return peer_pb2.PeerState(
        scheduler=claim.scheduler,
        leading=claim.leading,
        serving=claim.serving,
        candidate=claim.candidate,
        term=claim.term,
        reaching=claim.reaching,
    )
