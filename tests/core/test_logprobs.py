"""Logprobs pass through the core unread: with their tokens, once, and only where they fit the plan."""

from dataclasses import replace

import numpy as np
import pytest

from scheduler_svc.core import Request
from shared.errors import InvalidRequest, ProtocolError
from shared.logit_rules import LogitRules
from tests.core.simulation import make_simulation

EIGHT = (1, 2, 3, 1, 2, 3, 1, 1)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_result_with_other_logprobs_than_were_asked_for_is_refused(name: str) -> None:
    simulation = make_simulation(depths=[1])
    simulation.submit(EIGHT, logprobs=1, prompt_logprobs=1, max_tokens=3)
    simulation.plan(0)
    simulation.execute(0)
    (result,) = simulation.sides[0].results
    for data in (b"", getattr(result, name) + b"more"):
        with pytest.raises(ProtocolError, match=name):
            simulation.core.update(0, replace(result, **{name: data}))
    simulation.core.check_invariants()
    simulation.settle()


def test_logprobs_of_a_prompt_do_not_come_from_the_cache_but_fill_it() -> None:
    simulation = make_simulation()
    for asked, cached in ((1, 0), (1, 0), (None, 6)):
        job = simulation.jobs[simulation.submit(EIGHT, max_tokens=1, prompt_logprobs=asked)]
        simulation.settle()
        assert job.cached == cached


def test_rules_that_no_plan_can_carry_are_refused() -> None:
    """Otherwise their sequence would wait for ever, and the queue behind it."""
    core = make_simulation(max_plan_bytes=1 << 14).core
    word = (1,) * 300
    core.submit(Request(1, "fits", 0, np.array(EIGHT, dtype=np.int32), rules=LogitRules(bad_words=(word,))))
    with pytest.raises(InvalidRequest, match="at most 2048 fit"):
        core.submit(Request(2, "large", 0, np.array(EIGHT, dtype=np.int32), rules=LogitRules(bad_words=(word, word))))
    for rules in (LogitRules(bias=((8, 1.0),)), LogitRules(bad_words=((1, -1),))):
        with pytest.raises(InvalidRequest, match="not within"):
            core.submit(Request(3, "outside", 0, np.array(EIGHT, dtype=np.int32), rules=rules))


def test_a_sequence_that_looks_back_is_told_no_more_cached_tokens_than_fit() -> None:
    simulation = make_simulation(max_plan_bytes=1 << 14, pools=(512,), max_model_length=640, max_num_batched_tokens=64)
    long = EIGHT * 75
    for rules in (LogitRules(), LogitRules(presence_penalty=0.5), LogitRules(bias=((1, 1.0),))):
        key = simulation.submit(long, max_tokens=2, rules=rules)
        job = simulation.jobs[key]
        simulation.settle()
        assert job.cached == {0: 0, 1: 512, 2: 598}[key]
