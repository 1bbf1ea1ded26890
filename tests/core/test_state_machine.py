"""Random sequences of everything that can happen to the core, shrunk by hypothesis where a rule does not hold."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.logit_rules import LogitRules
from tests.core.random_runs import random_run
from tests.core.simulation import PROMPTS, RULES, make_simulation

GROUPS = st.integers(0, 3)


class CoreMachine(RuleBasedStateMachine):
    """Clients, engine and workers act in any order; the simulation compares with its oracles at each step."""

    @initialize(
        pools=st.lists(st.integers(8, 12), min_size=1, max_size=2),
        depth=st.integers(1, 4),
        seqs=st.integers(2, 4),
        more_tokens=st.integers(0, 4),
        look_past=st.integers(0, 3),
    )
    def start(self, pools: list[int], depth: int, seqs: int, more_tokens: int, look_past: int) -> None:
        self.simulation = make_simulation(
            pools=pools,
            depths=[depth] * len(pools),
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + more_tokens,
            max_model_length=16,
            look_past_steps=look_past,
        )

    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 8),
        given=st.sampled_from([0, 0, 2]),
        seed=st.integers(0, 1),
        max_tokens=st.sampled_from([1, 3, 7, None]),
        min_tokens=st.integers(0, 1),
        stops=st.sampled_from([(), (0,), (0, 3)]),
        salt=st.sampled_from(["", "tenant"]),
        priority=st.integers(0, 1),
        client=st.sampled_from(["", "a", "b"]),
        constrained=st.booleans(),
        rules=st.sampled_from(RULES),
        logprobs=st.sampled_from([None, None, 0, 1]),
        prompt_logprobs=st.sampled_from([None, None, 2]),
        received=st.sampled_from([0, 0, 3]),
    )
    def submit(
        self,
        prompt: tuple[int, ...],
        length: int,
        given: int,
        seed: int,
        max_tokens: int | None,
        min_tokens: int,
        stops: tuple[int, ...],
        salt: str,
        priority: int,
        client: str,
        constrained: bool,
        rules: LogitRules,
        logprobs: int | None,
        prompt_logprobs: int | None,
        received: int,
    ) -> None:
        self.simulation.offer(
            prompt[:length],
            given,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            cache_salt=salt,
            priority=priority,
            client=client,
            constrained=constrained,
            rules=rules,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_received=min(received, length),
        )

    @precondition(lambda self: self.simulation.jobs)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.simulation.abort(data.draw(st.sampled_from(sorted(self.simulation.jobs))))

    @rule(group=GROUPS, count=st.integers(1, 4), patient=st.booleans())
    def plan(self, group: int, count: int, patient: bool) -> None:
        for _ in range(count):
            self.simulation.plan(self.index(group), patient)

    @rule(group=GROUPS, count=st.integers(1, 4))
    def execute(self, group: int, count: int) -> None:
        for _ in range(count):
            self.simulation.execute(self.index(group))

    @rule(group=GROUPS, count=st.integers(1, 4))
    def deliver(self, group: int, count: int) -> None:
        for _ in range(count):
            self.simulation.deliver(self.index(group))

    @rule(group=GROUPS, count=st.integers(1, 8))
    def run_steps(self, group: int, count: int) -> None:
        self.simulation.send_masks()
        for _ in range(count):
            self.simulation.plan(self.index(group))
            self.simulation.execute(self.index(group))
            self.simulation.deliver(self.index(group))

    @rule(group=GROUPS)
    def heartbeat(self, group: int) -> None:
        self.simulation.heartbeat(self.index(group))

    @rule()
    def send_masks(self) -> None:
        self.simulation.send_masks()

    @rule(group=GROUPS, restart=st.booleans())
    def lose(self, group: int, restart: bool) -> None:
        self.simulation.lose(self.index(group), restart)

    @rule(group=GROUPS)
    def open(self, group: int) -> None:
        self.simulation.open(self.index(group))

    @rule(pool=st.integers(6, 12))
    @precondition(lambda self: len(self.simulation.sides) < 4)
    def add_group(self, pool: int) -> None:
        self.simulation.add(pool)

    @rule(group=GROUPS)
    def drain_group(self, group: int) -> None:
        self.simulation.drain(self.index(group))

    @rule(group=GROUPS)
    @precondition(lambda self: sum(not side.is_removed for side in self.simulation.sides) > 1)
    def remove_group(self, group: int) -> None:
        self.simulation.remove(self.index(group))

    @rule()
    def deliver_late(self) -> None:
        self.simulation.deliver_late()

    @rule(group=GROUPS, row=st.integers(0, 2))
    def break_row(self, group: int, row: int) -> None:
        self.simulation.sides[self.index(group)].broken_row = row

    @invariant()
    def is_consistent(self) -> None:
        self.simulation.core.check_invariants()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.settle()

    def index(self, group: int) -> int:
        """A group that exists."""
        return group % len(self.simulation.sides)


CoreMachine.TestCase.settings = settings(
    max_examples=250, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestCore = CoreMachine.TestCase


def test_random_runs() -> None:
    for seed in range(1000):
        random_run(seed)
