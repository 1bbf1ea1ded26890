"""Many rows are sampled a part at a time: each as if it were alone, in memory that does not grow with their number."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shared.logit_rules import LogitRules
from shared.logprobs import TokenEntry
from shared.types import NO_INTS, NO_TRIPLES, Admission, IntArray, RowSampling
from tests.worker.rules_oracle import adjusted, assert_near, entry_of
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.parallel import TensorParallel
from worker_svc.runner.batch import Limits
from worker_svc.runner.row_sampler import RowSampler
from worker_svc.runner.sampling_state import SamplingState
from worker_svc.step_inputs import ROWS_AT_A_TIME, StepRows

ROWS, VOCABULARY, LENGTH, NUM_TOP = 2 * ROWS_AT_A_TIME + 13, 300, 20, 3
LIMITS = Limits(ROWS, ROWS, LENGTH, 16, 8, VOCABULARY)
PROMPT = LENGTH - 5


class Case:
    """ROWS sequences with rules of all kinds, each with a prompt and some output, about to sample."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        rng = np.random.default_rng(5)
        self.sampler = RowSampler(VocabParallelEmbedding(VOCABULARY, 1, TensorParallel()), LIMITS, torch.device("cpu"))
        self.logits = torch.full((ROWS, 320), -torch.inf, dtype=dtype)  # the vocabulary is padded
        self.logits[:, :VOCABULARY] = torch.from_numpy(rng.normal(0, 2, (ROWS, VOCABULARY)))
        self.tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
        self.samplings = [self._sampling(row) for row in range(ROWS)]
        self.state = SamplingState(ROWS, VOCABULARY)
        admissions = [
            Admission(row, PROMPT, 0, LENGTH, NO_INTS, sampling) for row, sampling in enumerate(self.samplings)
        ]
        for admission in admissions:
            self.state.admit("", admission)
        self.sampler.begin(admissions, told(self.tokens))

    def _sampling(self, row: int) -> RowSampling:
        bits = np.packbits(np.arange(VOCABULARY) % 7 < 5, bitorder="little").tobytes()
        last = tuple(int(token) for token in self.tokens[row, -2:])
        rules = [
            LogitRules(),
            LogitRules(repetition_penalty=3.0, frequency_penalty=1.5, presence_penalty=0.5),
            LogitRules(bias=((row % VOCABULARY, 20.0),)),
            LogitRules(allowed=bits, bad_words=((*last, row % VOCABULARY), (5,))),
        ][row % 4]
        filters = {"top_p": 0.8} if row % 3 == 0 else {}
        return RowSampling(temperature=0.0 if row % 2 else 1.3, seed=row, rules=rules, **filters)

    def sample(self, *rows: int) -> list[int]:
        slots = np.array(rows)
        inputs = self.state.inputs(slots, slots, np.full(len(rows), LENGTH), ())
        return self.sampler.sample(self.logits, torch.from_numpy(slots), inputs).token_ids.tolist()

    def logprobs(self, tokens: list[int]) -> list[TokenEntry]:
        rows, count = torch.arange(ROWS), np.full(ROWS, NUM_TOP)
        entries = self.sampler.logprobs(self.logits, rows, torch.tensor(tokens), count).entries
        assert entries is not None
        values = entries.view(torch.float32).tolist()
        return [
            TokenEntry(own[0], ids[1], tuple(zip(ids[2::2], own[3::2], strict=True)))
            for own, ids in zip(values, entries.tolist(), strict=True)
        ]


def told(tokens: IntArray) -> StepRows:
    """The step in which the plan tells all tokens of all rows."""
    slots, lengths = np.arange(ROWS), np.full(ROWS, LENGTH)
    samples = np.ones(ROWS, dtype=bool)
    return StepRows(
        slots, lengths, np.zeros(ROWS, dtype=np.int64), lengths, samples, tokens.ravel(), NO_TRIPLES, NO_INTS, (),
        decodes=False, repeated=False,
    )  # fmt: skip


def test_each_row_is_sampled_as_if_it_were_alone() -> None:
    together, alone = Case(), Case()
    tokens = together.sample(*range(ROWS))
    assert tokens == [alone.sample(row)[0] for row in range(ROWS)]
    for row, sampling in enumerate(together.samplings):
        if sampling.temperature == 0:
            logits = together.logits[row, :VOCABULARY].numpy()
            context = together.tokens[row].tolist()
            wanted = adjusted(logits, context[:PROMPT], context[PROMPT:], sampling.rules).argmax()
            assert tokens[row] == wanted, row


def test_logits_stay_what_they_are_and_so_do_logprobs() -> None:
    case = Case()
    before = case.logits.clone()
    tokens = case.sample(*range(ROWS))
    assert torch.equal(case.logits, before)
    for row, entry in enumerate(case.logprobs(tokens)):
        assert_near(entry, entry_of(before[row, :VOCABULARY].numpy(), tokens[row], NUM_TOP))


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf._base is None]
        self.num_bytes = max([self.num_bytes, *(leaf.nbytes for leaf in made)])
        return given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_one_part_and_the_warm_up_takes_it(dtype: torch.dtype) -> None:
    case = Case(dtype)
    with Largest() as warm:
        case.sampler.warm_up(case.logits)
    case = Case(dtype)
    with Largest() as largest:
        case.logprobs(case.sample(*range(ROWS)))
    assert largest.num_bytes <= warm.num_bytes <= ROWS_AT_A_TIME * case.logits.shape[1] * 8
