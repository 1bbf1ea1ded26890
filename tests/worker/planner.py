"""A naive planner: hands out blocks one by one and says which rows to run, so that tests can drive a runner."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shared.model_config import load_model_config
from shared.types import Admission, RowSampling, StepPlan, TokenMask
from worker_svc.config import WorkerConfig
from worker_svc.parallel import TensorParallel
from worker_svc.runner.build import build_runner
from worker_svc.runner.runner import TorchRunner

BLOCK = 16
GREEDY = RowSampling(temperature=0.0)


def make_runner(folder: Path, group: TensorParallel | None = None, **settings: Any) -> TorchRunner:
    """One rank's runner in float64, with blocks of 16 tokens."""
    values = {"dtype": "float64", "block_size": BLOCK, "num_kv_blocks": 128, "max_num_seqs": 8, **settings}
    runner = build_runner(WorkerConfig(str(folder), **values), load_model_config(folder), group or TensorParallel())
    assert isinstance(runner, TorchRunner)
    return runner


@dataclass
class Sequence:
    """What the planner knows of one slot."""

    tokens: list[int]
    told: int
    """How many of them the runner has or gets from plans: it samples the others itself."""
    computed: int
    blocks: list[int]
    unknown: int = 0
    """Sampled tokens whose result was not read yet."""


@dataclass
class Planner:
    """Plans for one runner. Several plans may run before a result is read (`ahead`)."""

    runner: Any
    sequences: dict[int, Sequence] = field(default_factory=dict)
    step_id: int = 0
    next_block: int = 0
    admitted: list[Admission] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    """Of each step."""
    prompt_logprobs: list[bytes] = field(default_factory=list)
    """Of each step."""

    def open(self) -> None:
        """A new epoch."""
        self.runner.open_epoch()
        self.sequences.clear()
        self.step_id = 0

    def admit(
        self,
        slot: int,
        prompt: list[int],
        sampling: RowSampling = GREEDY,
        output: list[int] | None = None,
        cached: list[int] | None = None,
        prompt_logprobs_from: int = 1,
    ) -> None:
        """With the next plan; `cached` are blocks that hold the first tokens."""
        known, blocks = [*prompt, *(output or [])], cached or []
        length = len(blocks) * BLOCK
        self.sequences[slot] = Sequence(known, len(known), length, list(blocks))
        told = known[:length] if sampling.rules.looks_back else []
        self.admitted.append(
            Admission(
                slot,
                len(prompt),
                length,
                len(known),
                np.array(blocks, dtype=np.int32),
                sampling,
                np.array(told, dtype=np.int32),
                prompt_logprobs_from,
            )
        )

    def plan(self, rows: list[tuple[int, int]], masks: tuple[TokenMask, ...] = (), zeroed: tuple[int, ...] = ()):
        """The plan that computes `count` tokens of each slot, and the slots that sample."""
        self.step_id += 1
        grown, triples, ids, sampling = [], [], [], []
        for slot, count in rows:
            sequence = self.sequences[slot]
            known = sequence.tokens[sequence.computed : min(sequence.computed + count, sequence.told)]
            sequence.computed += count
            while len(sequence.blocks) * BLOCK < sequence.computed:
                sequence.blocks.append(self.next_block)
                grown.append((slot, self.next_block))
                self.next_block += 1
            triples.append((slot, count, len(known)))
            ids += known
            if sequence.computed == len(sequence.tokens) + sequence.unknown:
                sampling.append(slot)
                sequence.unknown += 1
        plan = StepPlan(
            epoch=1,
            step_id=self.step_id,
            admitted=tuple(self.admitted),
            grown=np.array(grown, dtype=np.int32).reshape(-1, 2),
            rows=np.array(triples, dtype=np.int32).reshape(-1, 3),
            token_ids=np.array(ids, dtype=np.int32),
            masks=masks,
            zeroed=np.array(zeroed, dtype=np.int32),
        )
        self.admitted = []
        return plan, sampling

    def step(self, rows: list[tuple[int, int]], **more: Any) -> list[int]:
        """Runs one plan; the tokens that it sampled. Failed rows give -1."""
        plan, sampling = self.plan(rows, **more)
        given = self.runner.step(plan).to_host()
        tokens, failed = given.token_ids, given.failed_rows
        self.logprobs.append(given.logprobs)
        self.prompt_logprobs.append(given.prompt_logprobs)
        assert len(tokens) == len(sampling)
        for slot, token in zip(sampling, tokens.tolist(), strict=True):
            self.sequences[slot].tokens.append(token)
            self.sequences[slot].unknown -= 1
        return [-1 if index in failed else token for index, token in enumerate(tokens.tolist())]

    def remaining(self, slot: int) -> int:
        """Tokens of the slot without K/V."""
        sequence = self.sequences[slot]
        return len(sequence.tokens) + sequence.unknown - sequence.computed

    def generate(self, slot: int, count: int, chunk: int = 10_000) -> list[int]:
        """`count` tokens of one slot, its first row in chunks."""
        out: list[int] = []
        while len(out) < count:
            out += self.step([(slot, min(chunk, self.remaining(slot)))])
        return out
