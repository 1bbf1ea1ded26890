"""Random runs of a simulation from a seed: the same rules as the state machine's, cheap enough for thousands."""

import random

from tests.core.simulation import PROMPTS, RULES, Simulation, make_simulation


def random_simulation(rng: random.Random, kind: type[Simulation]) -> Simulation:
    """One or two groups of scarce blocks at first, any depth."""
    groups = rng.choice([1, 1, 2])
    seqs = rng.randint(2, 4)
    return make_simulation(
        kind,
        pools=[rng.randint(6, 11) for _ in range(groups)],
        depths=[rng.randint(1, 4) for _ in range(groups)],
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.randint(seqs, 8),
        max_model_length=16,
        look_past_steps=rng.randint(0, 3),
    )


def random_submit(simulation: Simulation, rng: random.Random) -> None:
    """A request among few prompts, so that prefixes are shared."""
    prompt = rng.choice(PROMPTS[:3] if rng.random() < 0.95 else PROMPTS)[: rng.randint(1, 8)]
    simulation.offer(
        prompt,
        given=rng.choice([0, 0, 0, 1, 3]),
        seed=rng.randint(0, 2),
        max_tokens=rng.choice([1, 2, 5, 7, None]),
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=rng.choice([(), (0,), (0, 3)]),
        cache_salt=rng.choice(["", "", "tenant"]),
        priority=rng.choice([0, 0, 1]),
        client=rng.choice(["", "a", "b"]),
        constrained=rng.random() < 0.25,
        rules=rng.choice(RULES),
        logprobs=rng.choice([None, None, 0, 1]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
        prompt_logprobs_received=rng.choice([0, 0, len(prompt) // 2]),
    )


def random_change(simulation: Simulation, rng: random.Random, group: int) -> None:
    """A group comes, begins to leave, or is gone for good; one is always left."""
    change = rng.choice(["add", "drain", "remove"])
    if change == "add":
        simulation.add(rng.randint(6, 11), rng.randint(1, 4))
    elif change == "drain":
        simulation.drain(group)
    elif sum(not side.is_removed for side in simulation.sides) > 1:
        simulation.remove(group)


def random_run(seed: int, *, steps: int = 120, kind: type[Simulation] = Simulation, check: bool = True) -> Simulation:
    """Raises where a rule does not hold. Without `check` only clients and workers judge, not the core's invariants."""
    rng = random.Random(seed)
    simulation = random_simulation(rng, kind)
    come_and_go = rng.choice([0, 0, 3, 6])
    losses, faults = rng.choice([0, 0, 1, 4]), rng.choice([0, 0, 0, 1])
    for _ in range(steps):
        group, chance = rng.randrange(len(simulation.sides)), rng.random()
        if chance < 0.12 and simulation.submitted < 9:
            random_submit(simulation, rng)
        elif chance < 0.15 and simulation.jobs:
            simulation.abort(rng.choice(sorted(simulation.jobs)))
        elif chance < 0.17 and losses:
            losses -= 1
            simulation.lose(group, restart=rng.random() < 0.5)
        elif chance < 0.18 and faults:
            faults -= 1
            simulation.sides[group].broken_row = rng.randint(0, 3)
        elif chance < 0.22:
            simulation.deliver_late()
            simulation.open(group)
        elif chance < 0.28:
            simulation.send_masks()
        elif chance < 0.29:
            simulation.heartbeat(group)
        elif chance < 0.33 and come_and_go:
            come_and_go -= 1
            random_change(simulation, rng, group)
        else:
            rng.choice([simulation.plan, simulation.execute, simulation.deliver])(group)
        if check:
            simulation.core.check_invariants()
    simulation.settle()
    return simulation
