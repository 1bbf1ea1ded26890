"""Which of several schedulers serves: a state machine of one of them. Events in, `role` out.

No I/O and no clock: times are seconds on the caller's clock, and only differences between them count. It decides who
tries; that never two have the same worker is the lease's doing, so nothing here needs to be right for output to be.

The rules: who hears no leader claims; a candidate whom a worker answers goes first, then the lowest id. A claim is
numbered one above all that was heard. Of two that lead, who serves goes on, then who claimed last, then the lower id.
Who finds that workers stay in other hands gives up, since somebody whom it can't hear lives. Who leads and is answered
by no worker, while a peer is, gives way; where workers answer nobody they restart, and it stays.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from scheduler_svc.claim import Claim

TICK_S = 0.1
"""Between two ticks."""
ASLEEP_S = 1.0
"""An event that comes later than this after the one before: this process was stopped, and what it knows is old."""
SETTLE_S = 1.0
"""After the first worker: how long to wait for the others, to know what fits anywhere, and that nobody holds them."""
CONTEST_S = 5.0
"""How long workers may be in other hands before who wants them gives up; a lease that nobody keeps is over by then."""
YIELD_S = 2.0
"""How long workers must have answered a peer alone before who leads gives way; one that restarts is found sooner."""

MOST_TERM = 1 << 62
"""A peer that tells of more tells nonsense: claims are counted one by one, and the next must fit into a message."""


class Role(Enum):
    """What a scheduler does about the workers."""

    LISTENING = "listening"
    """It has just started and does not know yet: requests wait."""
    STANDBY = "standby"
    """It leaves the workers alone and refuses requests."""
    CLAIMING = "claiming"
    """It dials the workers; another one may still hold some. Requests wait."""
    LEADING = "leading"
    """Requests are served, or wait for workers that come back."""


@dataclass(slots=True)
class _Peer:
    """One address. `since` is the time of its last word, or from when on it has been expected to speak."""

    since: float
    claim: Claim | None = None
    is_absent: bool = False
    """It has never spoken, and nobody listens there."""


class Election:
    """One scheduler's view. Each event comes with the time; times never go back."""

    def __init__(
        self, scheduler: int, peer_timeout: float, now: float, *, alone: bool, yield_after: float = YIELD_S
    ) -> None:
        """`scheduler` is this one's id; `alone`: there are no peers, and it claims at once. `yield_after`: YIELD_S, or
        longer by as much as this one may hear later of a new worker's address than a peer does."""
        self.role = Role.CLAIMING if alone else Role.LISTENING
        self.is_contested = False
        """Its last claim failed: the workers were in other hands. Until it leads it refuses requests."""
        self._id = scheduler
        self._peer_timeout = peer_timeout
        self._term = 1 if alone else 0
        self._peers: dict[str, _Peer] = {}
        self._waits_for_addresses_since: float | None = None if alone else now
        self._yield_after = yield_after
        self._connected = self._complete = self._held = self._reaching = False
        self._connected_since: float | None = None
        self._held_since: float | None = None
        self._outreached_since: float | None = None
        self._resting_until = self._awake = now

    # What it says.

    @property
    def dials(self) -> bool:
        """Whether to dial the workers."""
        return self.role in (Role.CLAIMING, Role.LEADING)

    @property
    def probes(self) -> bool:
        """Whether to ask the workers if they answer, without taking any: they don't answer who leads."""
        leading = [claim for claim in self._claims(self._awake) if claim.leading]
        return self.role is Role.STANDBY and bool(leading) and not any(claim.reaching for claim in leading)

    @property
    def serves(self) -> bool:
        """Whether requests are computed here."""
        return self.role is Role.LEADING and self._connected

    @property
    def accepts(self) -> bool:
        """Whether a request is taken, to be computed or to wait."""
        return self.role is Role.LEADING or (self.role is not Role.STANDBY and not self.is_contested)

    @property
    def claim(self) -> Claim:
        """To tell the peers."""
        return Claim(
            self._id,
            leading=self.dials,
            serving=self.serves,
            candidate=self._awake >= self._resting_until,
            term=self._term,
            reaching=self._reaching,
        )

    def leader(self) -> str:
        """The address of the peer that leads; empty if none is known."""
        live = self._live(self._awake)
        leading = [(peer.claim.strength, at) for at, peer in live if peer.claim and peer.claim.leading]
        return max(leading)[1] if leading else ""

    # Events.

    def addresses(self, addresses: Iterable[str], now: float) -> None:
        """Where peers may be, this scheduler among them."""
        self._waits_for_addresses_since = None
        self._peers = {address: self._peers.get(address) or _Peer(now) for address in addresses}
        self._decide(now)

    def heard(self, address: str, claim: Claim, now: float) -> None:
        """A peer, or this scheduler itself, has spoken."""
        if address in self._peers:
            self._peers[address] = _Peer(now, replace(claim, term=min(claim.term, MOST_TERM)))
            self._decide(now)

    def unreachable(self, address: str, now: float) -> None:
        """Nobody listens there. Who has spoken there before is waited for as if he were silent: he may come back."""
        peer = self._peers.get(address)
        if peer is not None and peer.claim is None:
            peer.is_absent = True
            self._decide(now)

    def led_before(self, term: int, now: float) -> None:
        """This scheduler led when its last core process died: it goes on, if nobody has taken its place."""
        if self.role is Role.LISTENING:
            self.role, self._term = Role.CLAIMING, min(term, MOST_TERM)
            self._decide(now)

    def workers(self, now: float, *, connected: bool, complete: bool, held: bool, reaching: bool) -> None:
        """Whether any worker is connected, all are, whether any has refused because another scheduler has it, and
        whether any that fits answers, to who dials or to who probes. Said at least every TICK_S: time passes by it."""
        self._connected, self._complete, self._held, self._reaching = connected, complete, held, reaching
        self._connected_since = (self._connected_since or now) if connected else None
        self._held_since = (self._held_since or now) if held else None
        self._decide(now)

    # Decisions.

    def _decide(self, now: float) -> None:
        if now - self._awake > ASLEEP_S:
            for peer in self._peers.values():
                peer.since = now
            self._outreached_since = None
        self._awake = now
        if self.dials:
            self._defend(now)
        elif self._may_claim(now):
            self.role = Role.CLAIMING
            heard = [peer.claim.term for _, peer in self._others() if peer.claim]
            self._term = min(1 + max([self._term, *heard]), MOST_TERM)
        elif self.role is Role.LISTENING and not self._expects(now):
            self.role = Role.STANDBY

    def _defend(self, now: float) -> None:
        mine = self.claim.strength
        outreached = not self._reaching and any(claim.candidate and claim.reaching for claim in self._claims(now))
        self._outreached_since = (self._outreached_since or now) if outreached else None
        if any(claim.leading and claim.strength > mine for claim in self._claims(now)):
            self._step_down(now, rest=False)
        elif self._outreached_since is not None and now - self._outreached_since >= self._yield_after:
            self._step_down(now, rest=True)
        elif self.role is Role.CLAIMING and not self._held and self._is_settled(now):
            self.role, self.is_contested = Role.LEADING, False
        elif self._held_since is not None and now - self._held_since >= CONTEST_S and not self.serves:
            self.is_contested = True
            self._step_down(now, rest=True)

    def _is_settled(self, now: float) -> bool:
        return self._complete or (self._connected_since is not None and now - self._connected_since >= SETTLE_S)

    def _step_down(self, now: float, *, rest: bool) -> None:
        self.role = Role.STANDBY
        self._connected = self._complete = self._held = self._reaching = False
        self._connected_since = self._held_since = self._outreached_since = None
        if rest:
            self._resting_until = now + self._peer_timeout

    def _may_claim(self, now: float) -> bool:
        if now < self._resting_until or self._expects(now):
            return False
        mine = self.claim.precedence
        return not any(claim.leading or (claim.candidate and claim.precedence > mine) for claim in self._claims(now))

    def _expects(self, now: float) -> bool:
        """Whether somebody who has not spoken yet may do so."""
        if self._waits_for_addresses_since is not None:
            return now - self._waits_for_addresses_since < self._peer_timeout
        if any(claim.leading for claim in self._claims(now)):
            return False
        silent = [peer for peer in self._peers.values() if peer.claim is None and not peer.is_absent]
        return any(now - peer.since < self._peer_timeout for peer in silent)

    def _others(self) -> list[tuple[str, _Peer]]:
        return [(at, peer) for at, peer in self._peers.items() if not (peer.claim and peer.claim.scheduler == self._id)]

    def _live(self, now: float) -> list[tuple[str, _Peer]]:
        """Peers that have spoken lately."""
        return [(at, peer) for at, peer in self._others() if peer.claim and now - peer.since < self._peer_timeout]

    def _claims(self, now: float) -> list[Claim]:
        """Theirs."""
        return [peer.claim for _, peer in self._live(now) if peer.claim]
