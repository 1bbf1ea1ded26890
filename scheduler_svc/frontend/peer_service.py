"""What other schedulers are told of this one: the core's own words, as they come. A silent core makes it silent."""

from collections.abc import AsyncIterator
from typing import Any

from scheduler_svc.frontend.core_link import CoreLink
from shared.pb import peer_pb2, peer_pb2_grpc


class PeerService(peer_pb2_grpc.PeerServiceServicer):
    """One stream for each peer that listens."""

    def __init__(self, link: CoreLink) -> None:
        self._link = link
        self._is_leaving = False
        self._hands_off = False

    def leave(self, *, hands_off: bool) -> None:
        """This scheduler will lead no more; with `hands_off` somebody else shall, now."""
        self._is_leaving, self._hands_off = True, hands_off
        self._link.repeat()

    async def Watch(self, request: peer_pb2.WatchPeerRequest, context: Any) -> AsyncIterator[peer_pb2.PeerState]:
        seen = 0
        while True:
            seen = await self._link.next_state(seen)
            if self._link.state is not None:
                yield self._told(self._link.state.peer)

    def _told(self, peer: peer_pb2.PeerState) -> peer_pb2.PeerState:
        if not self._is_leaving:
            return peer
        leading = peer.leading and not self._hands_off
        return peer_pb2.PeerState(
            scheduler=peer.scheduler,
            leading=leading,
            serving=leading and peer.serving,
            term=peer.term,
            reaching=peer.reaching,
        )
