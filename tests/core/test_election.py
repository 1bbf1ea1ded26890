"""Elections in random worlds: schedulers that stop, die and start, links cut one way, workers with leases, clocks that
do not agree. The world knows nothing of how an election decides; it gives events and watches what may never be.
"""

import random
from dataclasses import dataclass, field
from functools import partial

import pytest

from scheduler_svc.claim import Claim
from scheduler_svc.election import ASLEEP_S, CONTEST_S, SETTLE_S, TICK_S, YIELD_S, Election, Role

PEER_TIMEOUT_S = 2.0
LEASE_S = 3.0
SPEAKS_EVERY_S = 0.5
DELAY_S = 0.05
SEEN_CHANCE = 0.7
"""In each tick, that a worker which has come is found."""
HEALED_IN_S = 3 * (CONTEST_S + PEER_TIMEOUT_S)
"""By then there is one leader again, whatever the world went through."""


@dataclass
class Worker:
    """Who holds it, and when it last heard of him."""

    holder: "Node | None" = None
    heard: float = 0.0
    is_up: bool = True


@dataclass(eq=False)
class Node:
    """A scheduler's process: its election, clock, and the plan streams that it believes in."""

    name: str
    number: int
    election: Election
    offset: float
    """Its clock minus the world's."""
    stopped: bool = False
    holds: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    """Workers that have answered it, whoever has them."""
    spoke: float = -1e9
    told: Claim | None = None


class World:
    """Time runs in steps of a tick. Cuts are one-way: (from, to)."""

    def __init__(self, rng: random.Random, nodes: int = 2, workers: int = 2) -> None:
        self.rng = rng
        self.now = 0.0
        self.workers = [Worker() for _ in range(workers)]
        self.nodes: dict[str, Node] = {}
        self.cuts: set[tuple[object, object]] = set()
        self.whole_since = 0.0
        self.messages: list[tuple[float, str, str, Claim]] = []
        self.addresses = [f"s{number}:1" for number in range(nodes)]
        for address in self.addresses:
            self.start(address)

    def start(self, address: str) -> Node:
        """A new process at an address, of a new id and with a clock of its own."""
        number, clock = self.rng.getrandbits(64), self.rng.uniform(0, 1e6)
        election = Election(number, PEER_TIMEOUT_S, clock, alone=False)
        election.addresses(self.addresses, clock)
        node = self.nodes[address] = Node(address, number, election, clock - self.now)
        return node

    def kill(self, address: str) -> None:
        """The kernel closes its connections."""
        node = self.nodes.pop(address)
        for number in node.holds:
            if self.workers[number].holder is node:
                self.workers[number].holder = None

    def reaches(self, source: object, target: object) -> bool:
        return (source, target) not in self.cuts

    def step(self) -> None:
        self.now += TICK_S
        for worker in self.workers:
            if worker.holder is not None and self.now - worker.heard > LEASE_S:
                worker.holder = None
        for node in list(self.nodes.values()):
            if not node.stopped:
                self._turn(node)
        self.check()

    def cut_off(self, *nodes: Node) -> None:
        """From all workers."""
        ends = [(node.name, ("worker", number)) for node in nodes for number in range(len(self.workers))]
        self.cuts |= {pair for end in ends for pair in (end, end[::-1])}

    def heal(self) -> None:
        """Links do what they should from now on; what was lost is told again soon."""
        self.cuts.clear()
        self.whole_since = self.now

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.step()

    def _turn(self, node: Node) -> None:
        """One turn of a process's loop, in any order: peers' messages, its workers."""
        parts = [self._receive, self._dial]
        self.rng.shuffle(parts)
        for part in parts:
            part(node)
        claim = node.election.claim
        if claim != node.told or self.now - node.spoke >= SPEAKS_EVERY_S:
            node.spoke, node.told = self.now, claim
            for other in self.addresses:
                if self.reaches(node.name, other) or other == node.name:
                    self.messages.append((self.now + self.rng.random() * DELAY_S, node.name, other, claim))

    def _receive(self, node: Node) -> None:
        now = self.now + node.offset
        mine = [message for message in self.messages if message[2] == node.name and message[0] <= self.now]
        self.messages = [message for message in self.messages if message not in mine]
        for _, source, _, claim in mine:
            node.election.heard(source, claim, now)
        for other in self.addresses:
            if other not in self.nodes and self.reaches(node.name, other):
                node.election.unreachable(other, now)

    def _dial(self, node: Node) -> None:
        for number, worker in enumerate(self.workers):
            there = worker.is_up and self.reaches(node.name, ("worker", number))
            back = self.reaches(("worker", number), node.name)
            self._ask(node, number, answers=there and back)
            if node.election.dials and there and worker.holder in (None, node):
                worker.holder, worker.heard = node, self.now  # a plan arrives
            elif not node.election.dials and worker.holder is node and there:
                worker.holder = None  # let go
            held = node.election.dials and number in node.answered
            (node.holds.add if held and worker.holder is node else node.holds.discard)(number)
            (node.refused.add if held and worker.holder is not node else node.refused.discard)(number)
        node.election.workers(
            self.now + node.offset,
            connected=bool(node.holds),
            complete=len(node.holds) == len(self.workers),
            held=bool(node.refused),
            reaching=bool(node.answered),
        )

    def _ask(self, node: Node, number: int, *, answers: bool) -> None:
        """An end is seen at once, a return now and then: who waits for it asks again and again."""
        if not answers or not (node.election.dials or node.election.probes):
            node.answered.discard(number)
        elif self.rng.random() < SEEN_CHANCE:
            node.answered.add(number)

    @property
    def serving(self) -> list[Node]:
        """Those that compute for clients: they believe so, and have turned lately."""
        return [node for node in self.nodes.values() if node.election.serves and not node.stopped]

    def check(self) -> None:
        """Where all can hear each other, one that just woke too, no two serve, and none serves without a lease."""
        peers_are_cut = any(isinstance(source, str) and isinstance(target, str) for source, target in self.cuts)
        if peers_are_cut or self.now - self.whole_since < PEER_TIMEOUT_S + LEASE_S:
            return
        holders = {worker.holder.name for worker in self.workers if worker.holder and worker.holder.election.serves}
        assert len(holders) <= 1, holders
        assert all(node.name in holders for node in self.serving if node.holds), self.serving

    def one_leads(self) -> Node:
        """The only one that does anything, and it serves."""
        (leader,) = [node for node in self.nodes.values() if node.election.dials]
        assert leader.election.serves, leader
        others = [node.election for node in self.nodes.values() if node is not leader]
        assert all(other.role is Role.STANDBY and not other.accepts for other in others)
        assert all(other.leader() == leader.name for other in others)
        return leader


def settled(seed: int = 0, **shape: int) -> tuple[World, Node]:
    world = World(random.Random(seed), **shape)
    world.run(PEER_TIMEOUT_S + 1)
    return world, world.one_leads()


def standby_of(world: World) -> Node:
    return next(node for node in world.nodes.values() if not node.election.dials)


@pytest.mark.parametrize("seed", range(20))
def test_of_two_that_start_together_the_lower_id_leads_soon(seed: int) -> None:
    world = World(random.Random(seed))
    world.run(1.0)
    assert world.one_leads().number == min(node.number for node in world.nodes.values())


def test_without_peers_it_leads_as_soon_as_its_workers_are_there() -> None:
    election = Election(1, PEER_TIMEOUT_S, 0.0, alone=True)
    assert election.dials and election.accepts and not election.serves
    election.workers(0.1, connected=True, complete=False, held=False, reaching=True)
    assert not election.serves, "another worker may be larger"
    election.workers(0.1 + SETTLE_S, connected=True, complete=False, held=False, reaching=True)
    assert election.serves


@pytest.mark.parametrize("fate", ["kill", "stop", "cut"])
@pytest.mark.parametrize("seed", range(20))
def test_the_standby_serves_within_five_seconds(seed: int, fate: str) -> None:
    world, leader = settled(seed)
    standby = standby_of(world)
    if fate == "kill":
        world.kill(leader.name)
    elif fate == "stop":
        leader.stopped = True
    else:
        ends = [standby.name, ("worker", 0), ("worker", 1)]
        world.cuts = {pair for end in ends for pair in ((leader.name, end), (end, leader.name))}
    world.run(PEER_TIMEOUT_S - 3 * SPEAKS_EVERY_S / 2)
    assert not standby.election.dials, "it is only silent yet"
    world.run(5.0 - (PEER_TIMEOUT_S - 3 * SPEAKS_EVERY_S / 2))
    assert standby.election.serves


@pytest.mark.parametrize("seed", range(20))
def test_who_was_stopped_becomes_the_standby(seed: int) -> None:
    """In whatever order it learns that its leases are over and that another one leads."""
    world, leader = settled(seed)
    leader.stopped = True
    world.run(10.0)
    (successor,) = world.serving
    leader.stopped = False
    for _ in range(round(1.0 / TICK_S)):
        world.step()
        assert successor.election.serves
    assert world.one_leads() is successor


def test_one_that_was_stopped_listens_before_it_judges() -> None:
    """All that it knows is old: it gives a peer as long as when it starts."""
    election = Election(1, PEER_TIMEOUT_S, 0.0, alone=False)
    tick = partial(election.workers, connected=False, complete=False, held=False, reaching=False)
    election.addresses(["peer"], 0.0)
    election.heard("peer", Claim(2, leading=True, serving=True, term=1), 0.1)
    assert election.role is Role.STANDBY
    tick(100.0)
    assert not election.dials
    for turn in range(round(PEER_TIMEOUT_S / TICK_S)):
        tick(100.0 + turn * TICK_S)
        assert not election.dials
    tick(100.0 + PEER_TIMEOUT_S)
    assert election.dials


def test_who_has_a_worker_waits_while_another_one_is_in_other_hands() -> None:
    """It might be that of somebody who serves there."""
    election = Election(1, PEER_TIMEOUT_S, 0.0, alone=True)
    for now in (0.1, 0.1 + SETTLE_S, CONTEST_S):
        election.workers(now, connected=True, complete=False, held=True, reaching=True)
        assert election.dials and not election.serves
    election.workers(0.1 + CONTEST_S, connected=True, complete=False, held=True, reaching=True)
    assert election.role is Role.STANDBY and not election.accepts


@pytest.mark.parametrize(
    ("mine", "other", "stays"),
    [
        ((True, 1), Claim(1, leading=True, serving=True, term=2), False),
        ((True, 2), Claim(1, leading=True, serving=True, term=1), True),
        ((True, 1), Claim(1, leading=True, serving=False, term=2), True),
        ((True, 1), Claim(1, leading=True, serving=True, term=1), False),
        ((True, 1), Claim(9, leading=True, serving=True, term=1), True),
        ((False, 1), Claim(1, leading=True, serving=False, term=2), False),
        ((False, 1), Claim(9, leading=False, term=7), True),
    ],
)
def test_of_two_that_lead_one_gives_way(mine: tuple[bool, int], other: Claim, stays: bool) -> None:
    """Who serves, then who claimed last, then the lower id."""
    serving, term = mine
    election = Election(5, PEER_TIMEOUT_S, 0.0, alone=False)
    election.addresses(["peer"], 0.0)
    election.led_before(term, 0.0)
    election.workers(0.1, connected=serving, complete=serving, held=False, reaching=serving)
    assert election.claim == Claim(5, leading=True, serving=serving, term=term, reaching=serving)
    election.heard("peer", other, 0.2)
    assert election.dials is stays


def test_of_two_candidates_the_lower_id_claims() -> None:
    for number, claims in ((1, True), (9, False)):
        election = Election(number, PEER_TIMEOUT_S, 0.0, alone=False)
        election.addresses(["peer"], 0.0)
        election.heard("peer", Claim(5), 0.1)
        assert election.dials is claims
    election.heard("peer", Claim(5, candidate=False), 0.2)
    assert election.dials, "the other one is about to leave"


def test_where_nobody_listens_nobody_is_waited_for() -> None:
    election = Election(1, PEER_TIMEOUT_S, 0.0, alone=False)
    election.addresses(["peer", "own"], 0.0)
    election.heard("own", Claim(1), 0.1)
    assert not election.dials
    election.unreachable("peer", 0.2)
    assert election.dials


@pytest.mark.parametrize("seed", range(20))
def test_a_standby_that_was_stopped_does_not_claim(seed: int) -> None:
    """What it knew was old when it woke: it listens first."""
    world, leader = settled(seed)
    standby = standby_of(world)
    standby.stopped = True
    world.run(10.0)
    standby.stopped = False
    for _ in range(50):
        world.step()
        assert not standby.election.dials
    assert world.one_leads() is leader


@pytest.mark.parametrize("seed", range(20))
def test_workers_that_restart_stay_with_the_leader(seed: int) -> None:
    world, leader = settled(seed)
    for worker in world.workers:
        worker.is_up, worker.holder = False, None
    for _ in range(300):
        world.step()
        assert leader.election.accepts and not standby_of(world).election.dials
    world.workers[1].is_up = True
    world.run(1.0)
    assert world.one_leads() is leader


@pytest.mark.parametrize("seed", range(20))
def test_a_leader_that_its_peer_does_not_hear_keeps_its_workers(seed: int) -> None:
    """The workers tell the peer that somebody lives. It gives up, and refuses requests when it tries again."""
    world, leader = settled(seed)
    standby = standby_of(world)
    world.cuts = {(leader.name, standby.name), (standby.name, leader.name)}
    for _ in range(round(60 / TICK_S)):
        world.step()
        assert leader.election.serves and not standby.election.serves
    assert not standby.election.accepts
    world.heal()
    world.run(1.0)
    assert world.one_leads() is leader


def test_a_core_that_restarts_goes_on_where_it_led() -> None:
    """Though its peer has the lower id."""
    world, leader = settled(1)
    standby = standby_of(world)
    standby.election = Election(0, PEER_TIMEOUT_S, world.now + standby.offset, alone=False)
    standby.election.addresses(world.addresses, world.now + standby.offset)
    world.run(1.0)
    assert world.one_leads() is leader
    term = leader.election.claim.term
    world.kill(leader.name)
    world.run(1.0)
    again = world.start(leader.name)
    again.election.led_before(term, world.now + again.offset)
    world.run(1.0)
    assert world.one_leads() is again


@pytest.mark.parametrize("seed", range(20))
def test_a_leader_that_no_worker_answers_gives_way_to_a_peer_that_one_does(seed: int) -> None:
    world, leader = settled(seed, nodes=3)
    first, last = (node for node in world.nodes.values() if node is not leader)
    world.cut_off(leader, first)
    world.run(3 * YIELD_S + LEASE_S)
    assert world.one_leads() is last
    world.heal()
    world.run(10.0)
    assert world.one_leads() is last, "there is no reason to change again"


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_that_restarts_stays_where_it_alone_is_left(seed: int) -> None:
    """Though the standby may find it sooner."""
    world, leader = settled(seed, workers=1)
    for _ in range(5):
        world.workers[0].is_up, world.workers[0].holder = False, None
        world.run(world.rng.uniform(0.1, 8.0))
        world.workers[0].is_up = True
        world.run(2.0)
        assert world.one_leads() is leader


def test_who_hears_later_of_addresses_gives_way_later() -> None:
    def gives_way_at(**options: float) -> float:
        election, now = Election(1, PEER_TIMEOUT_S, 0.0, alone=False, **options), 0.0
        election.addresses(["peer"], now)
        election.led_before(1, now)
        while election.dials:
            now += TICK_S
            election.heard("peer", Claim(2, reaching=True, term=1), now)
            election.workers(now, connected=False, complete=False, held=False, reaching=False)
        return now

    assert YIELD_S <= gives_way_at() < YIELD_S + 1 < 7.0 <= gives_way_at(yield_after=7.0) < 8.0


@pytest.mark.parametrize("seed", range(40))
def test_where_all_schedulers_hear_each_other_whoever_reaches_a_worker_serves(seed: int) -> None:
    """Whatever links between them and the workers are cut, both ways or one way."""
    world, _ = settled(seed, nodes=3, workers=2)
    ends = [(name, ("worker", number)) for name in world.addresses for number in (0, 1)]
    world.cuts = {pair for end in ends for pair in (end, end[::-1]) if world.rng.random() < 0.5}
    world.run(HEALED_IN_S)
    able = [name for name, worker in ends if not world.cuts & {(name, worker), (worker, name)}]
    assert [node.name in able for node in world.serving] == [True] * bool(able)


def random_world(seed: int, nodes: int) -> None:
    rng = random.Random(seed)
    world = World(rng, nodes=nodes, workers=rng.randint(1, 3))
    ends: list[object] = [*world.addresses, *(("worker", number) for number in range(len(world.workers)))]
    for _ in range(rng.randint(1, 12)):
        address = rng.choice(world.addresses)
        match rng.choice(["kill", "start", "stop", "continue", "cut", "heal", "worker"]):
            case "kill" if address in world.nodes:
                world.kill(address)
            case "start" if address not in world.nodes:
                world.start(address)
            case "stop" if address in world.nodes:
                world.nodes[address].stopped = True
            case "continue" if address in world.nodes:
                world.nodes[address].stopped = False
            case "cut":
                world.cuts.add(tuple(rng.sample(ends, 2)))  # type: ignore[arg-type]
            case "heal":
                world.heal()
            case "worker":
                worker = rng.choice(world.workers)
                worker.is_up, worker.holder = not worker.is_up, None
        world.run(rng.uniform(0.1, 12.0))
    world.heal()
    for worker in world.workers:
        worker.is_up = True
    for address in world.addresses:
        if address not in world.nodes:
            world.start(address)
        world.nodes[address].stopped = False
    world.run(HEALED_IN_S)
    world.one_leads()


@pytest.mark.parametrize("nodes", [2, 3])
def test_random_worlds_end_with_one_leader(nodes: int) -> None:
    for seed in range(60):
        random_world(seed, nodes)


def test_the_constants_leave_time_for_a_lease_to_end() -> None:
    assert CONTEST_S > LEASE_S and ASLEEP_S > SPEAKS_EVERY_S > TICK_S
