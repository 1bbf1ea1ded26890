"""Core, reference workers and clients in one process: every token and every block is compared with an oracle."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from scheduler_svc.core import CoreConfig, Request, RequeueCause, Scheduler, StepOutputs
from scheduler_svc.core.quarantine import MOST_LOSSES
from shared.errors import InvalidRequest, RequestFailed, TandemError, Unavailable
from shared.logit_rules import NO_RULES, LogitRules
from shared.types import FinishReason, StepPlan, StepResult
from tests.core.reference_worker import (
    POISON,
    VOCABULARY_SIZE,
    ReferenceWorker,
    Tokens,
    allowed_tokens,
    logprobs_entry,
    next_token,
)

BLOCK_SIZE = 2
PROMPTS: tuple[Tokens, ...] = (
    (1, 2, 3, 1, 2, 3, 1, 1),
    (1, 2, 3, 1, 1, 2, 2, 3),
    (2, 2, 1, 3, 1, 2, 3, 3),
    (1, 2, 3, 1, POISON, 2, 2, 3),
)


RULES = (NO_RULES, NO_RULES, LogitRules(bias=((1, 2.0),)), LogitRules(repetition_penalty=1.5))
"""Without effect on the tokens of the reference worker, which checks that it is told what they look back at."""


class Violation(Exception):
    """A client got something other than what the oracle says."""


def oracle(request: Request, context_limit: int) -> tuple[Tokens, FinishReason]:
    """The output of a request on an undisturbed machine, tokens given in `output` included."""
    tokens: Tokens = tuple(request.prompt.tolist())
    most = min(request.max_tokens or context_limit, context_limit - len(tokens))
    output: Tokens = ()
    while len(output) < most:
        mask = allowed_tokens(tokens) if request.constrained else None
        token = next_token(tokens, len(output), request.row_sampling(), mask)
        tokens, output = (*tokens, token), (*output, token)
        if token in request.stop_token_ids and len(output) > request.min_tokens:
            return output, FinishReason.STOP_TOKEN
    return output, FinishReason.LENGTH


@dataclass
class Job:
    """A request as its client sees it."""

    request: Request
    expected: Tokens
    how: FinishReason
    received: list[int]
    limit: int
    """Tokens of prompt and output at which it ends by length."""
    masks_sent: int = -1
    """Highest output position whose mask was sent."""
    losses: int = 0
    """Worker losses since its last token."""
    cached: int | None = None
    """Cached tokens, once it started."""
    logprobs: bytes = b""
    prompt_logprobs: bytes = b""

    def expected_logprobs(self) -> bytes:
        """Of the tokens received beyond those given."""
        prompt, given = tuple(self.request.prompt.tolist()), len(self.request.output)
        ends = range(given + 1, len(self.received) + 1)
        return b"".join(logprobs_entry((*prompt, *self.received[:end]), self.request.logprobs) for end in ends)

    def expected_prompt_logprobs(self) -> bytes:
        """Of all tokens of the prompt that were not received before."""
        prompt = tuple(self.request.prompt.tolist())
        ends = range(max(1, self.request.prompt_logprobs_received) + 1, len(prompt) + 1)
        return b"".join(logprobs_entry(prompt[:end], self.request.prompt_logprobs) for end in ends)


@dataclass
class GroupSide:
    """A worker group and its connection."""

    worker: ReferenceWorker
    depth: int
    is_open: bool = False
    is_removed: bool = False
    draining: bool = False
    plans: deque[StepPlan] = field(default_factory=deque)
    results: deque[StepResult] = field(default_factory=deque)
    unanswered: int = 0
    broken_row: int | None = None
    """Row of the next step whose K/V becomes NaN."""
    tainted: set[int] = field(default_factory=set)
    """Blocks of requests that failed by NaN, to be zeroed before reuse."""


class Simulation:
    """One core with its surroundings. Raises Violation, Unsound or AssertionError where a rule does not hold."""

    def __init__(self, config: CoreConfig, pools: Sequence[int], depths: Sequence[int]) -> None:
        self.config = config
        self.core = Scheduler(config)
        self.pools = list(pools)
        self.sides = [
            GroupSide(ReferenceWorker(blocks, config.block_size, config.max_num_seqs), depth)
            for blocks, depth in zip(pools, depths, strict=True)
        ]
        self.jobs: dict[int, Job] = {}
        self.late: deque[tuple[int, StepResult]] = deque()
        self.submitted = 0
        self.ends: dict[int, FinishReason | TandemError] = {}
        self.requeued: list[tuple[int, RequeueCause]] = []
        """Who went back to the queue, as the clients were told."""
        self.num_tokens = 0
        """All tokens that clients got."""
        self.faults = 0
        """Rows whose K/V a machine's fault made NaN, each good for one failed request."""
        for group in range(len(pools)):
            self.open(group)

    # What clients do.

    def submit(self, prompt: Tokens, given: int = 0, **fields: Any) -> int:
        """A new request, resumed after `given` tokens of its output. `fields` are those of Request."""
        key = self.submitted
        fields.setdefault("request_id", f"request {key}")
        request = Request(key=key, sample_index=0, prompt=np.array(prompt, dtype=np.int32), **fields)
        expected, how = oracle(request, self.core.context_limit)
        output = expected[:given]
        request = replace(request, output=np.array(output, dtype=np.int32))
        self.core.submit(request)
        self.submitted += 1
        limit = self.core.context_limit
        if request.max_tokens is not None:
            limit = min(len(prompt) + request.max_tokens, self.config.max_model_length)
        self.jobs[key] = Job(request, expected, how, list(output), limit)
        self.collect(self.core.take_outputs())
        return key

    def offer(self, prompt: Tokens, given: int = 0, **fields: Any) -> None:
        """As submit; what fits no group may be refused, and nothing else."""
        try:
            self.submit(prompt, given, **fields)
        except InvalidRequest:
            longest = len(prompt) + (fields["max_tokens"] or 1)
            if self.fits_somewhere(min(longest, self.config.max_model_length)):
                raise

    def abort(self, key: int) -> None:
        """The client leaves, or found a stop string."""
        if not self.core.abort(key):
            raise Violation(f"request {key} is not known")
        del self.jobs[key]

    def send_masks(self) -> None:
        """The grammar matchers answer for all tokens seen so far."""
        for key, job in self.jobs.items():
            position = len(job.received)
            if job.request.constrained and job.masks_sent < position:
                tokens = (*job.request.prompt.tolist(), *job.received)
                self.core.mask_ready(key, position, allowed_tokens(tokens))
                job.masks_sent = position

    def collect(self, outputs: StepOutputs) -> None:
        """The clients read."""
        for key, cached in outputs.started:
            job = self.jobs[key]
            if job.cached is not None or not 0 <= cached < len(job.request.prompt) + len(job.received):
                raise Violation(f"request {key} started with {cached} cached tokens, before: {job.cached}")
            job.cached = cached
        self.requeued += [(key, cause) for key, cause in outputs.requeued if key in self.jobs]
        self.num_tokens += len(outputs.keys)
        for key, entries in outputs.prompt_logprobs:
            self.jobs[key].prompt_logprobs += entries
        sizes, entries = outputs.logprobs.sizes.tolist() or [0] * len(outputs.keys), outputs.logprobs.entries
        for key, token, size in zip(outputs.keys.tolist(), outputs.token_ids.tolist(), sizes, strict=True):
            job = self.jobs[key]
            job.received.append(token)
            job.logprobs, entries = job.logprobs + entries[:size], entries[size:]
            if job.prompt_logprobs != job.expected_prompt_logprobs():
                raise Violation(f"request {key} got a token before the logprobs of its prompt")
            job.losses = 0
            if job.cached is None:
                raise Violation(f"request {key} got a token before it started")
            if tuple(job.received) != job.expected[: len(job.received)]:
                raise Violation(f"request {key} got {job.received}, expected {job.expected}")
        if entries:
            raise Violation("logprobs of no token")
        for ended in outputs.ended:
            self._end(self.jobs.pop(ended.key), ended.how)
            self.ends[ended.key] = ended.how

    def _end(self, job: Job, how: FinishReason | TandemError) -> None:
        if isinstance(how, Unavailable):
            if self.fits_somewhere(max(job.limit, len(job.request.prompt) + 1)):
                raise Violation(f"request {job.request.key} fits a group that is there, and ended {how!r}")
        elif isinstance(how, TandemError):
            if not isinstance(how, RequestFailed):
                raise Violation(f"request {job.request.key} ended with {how!r}")
            if "finite" in str(how) and POISON not in job.request.prompt:
                self.faults -= 1
                if self.faults < 0:
                    raise Violation("more requests failed than rows did")
            elif "finite" not in str(how) and job.losses < MOST_LOSSES:
                raise Violation(f"request {job.request.key} was quarantined after {job.losses} losses")
        elif how is not job.how or tuple(job.received) != job.expected:
            raise Violation(f"request {job.request.key} ended {how} with {job.received}, expected {job.expected}")
        elif job.logprobs != job.expected_logprobs():
            raise Violation(f"request {job.request.key} did not get each token's logprobs once")

    def largest(self) -> int:
        """The longest sequence that a group that is there or comes back can hold; the last token needs no place."""
        pools = [pool for pool, side in zip(self.pools, self.sides, strict=True) if not side.is_removed]
        return min(max(pools) * self.config.block_size + 1, self.config.max_model_length)

    def fits_somewhere(self, limit: int) -> bool:
        """Whether such a group can hold a sequence of so many tokens."""
        return limit <= self.largest()

    # What the engine and the workers do.

    def plan(self, group: int, patient: bool = False) -> bool:
        """Sends the group's next plan, if there is one and depth allows it."""
        side = self.sides[group]
        if not side.is_open or side.unanswered >= side.depth:
            return False
        plan = self.core.schedule(group, patient=patient)
        if plan is None:
            return False
        self._send(side, plan)
        return True

    def step(self, group: int = 0, count: int = 1) -> None:
        """Plans, executes and delivers, without plans ahead."""
        for _ in range(count):
            self.plan(group)
            self.execute(group)
            self.deliver(group)

    def heartbeat(self, group: int) -> None:
        """Sends a plan without rows."""
        side = self.sides[group]
        if side.is_open and side.unanswered < side.depth:
            self._send(side, self.core.heartbeat(group))

    def _send(self, side: GroupSide, plan: StepPlan) -> None:
        if plan.rows[:, 1].sum() > self.config.max_num_batched_tokens:
            raise Violation("more tokens than a plan may have")
        if not set(plan.grown[:, 0].tolist()) <= set(plan.rows[:, 0].tolist()):
            raise Violation("blocks without a row")
        self._check_zeroed(side, plan)
        side.plans.append(plan)
        side.unanswered += 1

    def _check_zeroed(self, side: GroupSide, plan: StepPlan) -> None:
        taken = set(plan.grown[:, 1].tolist())
        cached = {block for admission in plan.admitted for block in admission.block_ids.tolist()}
        if taken & side.tainted - set(plan.zeroed.tolist()) or cached & side.tainted - taken:
            raise Violation("a block that may hold NaN is reused")
        side.tainted -= taken

    def execute(self, group: int) -> bool:
        """The worker executes its next plan."""
        side = self.sides[group]
        if not side.plans:
            return False
        plan = side.plans.popleft()
        if side.broken_row is not None and side.broken_row < len(plan.rows):
            self.faults += 1
            side.results.append(side.worker.execute(plan, side.broken_row))
            side.broken_row = None
        else:
            side.results.append(self.run_step(side.worker, plan))
        side.results[-1] = replace(side.results[-1], draining=side.draining)
        if not side.plans:
            self.compare(group)
        return True

    def run_step(self, worker: ReferenceWorker, plan: StepPlan) -> StepResult:
        """One step of a worker; tests of the worker's own rules replace it."""
        return worker.execute(plan)

    def deliver(self, group: int) -> bool:
        """The core gets the group's next result."""
        side = self.sides[group]
        if not side.results:
            return False
        side.unanswered -= 1
        tables = {sequence.request.key: list(sequence.table) for sequence in self.core._groups[group].batch.running()}
        outputs = self.core.update(group, side.results.popleft())
        for ended in outputs.ended:
            if isinstance(ended.how, RequestFailed):
                side.tainted.update(tables.get(ended.key, ()))
        self.collect(outputs)
        self.collect(self.core.take_outputs())
        return True

    def deliver_late(self) -> None:
        """A result of a stream that was lost comes after all."""
        if self.late:
            group, result = self.late.popleft()
            self.collect(self.core.update(group, result))

    def open(self, group: int) -> None:
        """The group's stream opens, and its first plan is answered; one that was removed stays away."""
        side = self.sides[group]
        if side.is_open or side.is_removed:
            return
        self.core.worker_ready(group, self.pools[group])
        side.worker.restart_log()
        side.is_open = True
        side.draining = False
        self.heartbeat(group)
        self.execute(group)
        self.deliver(group)

    def add(self, pool: int, depth: int = 2) -> int:
        """A group comes that was not there before; its number."""
        self.pools.append(pool)
        worker = ReferenceWorker(pool, self.config.block_size, self.config.max_num_seqs)
        self.sides.append(GroupSide(worker, depth))
        self.open(len(self.sides) - 1)
        return len(self.sides) - 1

    def remove(self, group: int) -> None:
        """A group is lost for good. Who fits no other one is told so; who set no length gets a shorter one."""
        self.lose(group, restart=True)
        self.sides[group].is_removed = True
        for job in self.jobs.values():
            if job.request.max_tokens is None and not self.fits_somewhere(job.limit):
                job.limit = self.largest()
                job.expected, job.how = oracle(job.request, job.limit)
                if len(job.received) >= len(job.expected):
                    job.expected, job.how = tuple(job.received), FinishReason.LENGTH
        self.collect(self.core.forget_group(group, Unavailable("gone")))

    def drain(self, group: int) -> None:
        """The group's results say from now on that it is about to leave."""
        self.sides[group].draining = True

    def lose(self, group: int, restart: bool) -> None:
        """The group's stream breaks, or (`restart`) its worker dies with all its memory."""
        side = self.sides[group]
        if not side.is_open:
            return
        self.late.extend((group, result) for result in side.results)
        if restart:
            side.worker = ReferenceWorker(self.pools[group], self.config.block_size, self.config.max_num_seqs)
        side.plans.clear()
        side.results.clear()
        side.tainted.clear()
        side.unanswered, side.is_open = 0, False
        for job in self.jobs.values():
            job.losses += 1
        self.collect(self.core.worker_lost(group))

    def restart_drained(self, group: int) -> None:
        """A group that drains and has nothing left to do is let go, and started again."""
        side = self.sides[group]
        if side.draining and side.is_open and not side.unanswered and not self.core.load().groups[group].running:
            self.lose(group, restart=True)

    # What must hold.

    def compare(self, group: int) -> None:
        """The worker has executed every plan: its fold and its memory must be what the core believes."""
        ready, worker = self.core._groups[group], self.sides[group].worker
        for sequence in ready.batch.running():
            state = worker.slots[sequence.slot]
            assert state.table == sequence.table, f"slot {sequence.slot}: block tables differ"
            assert state.computed == ready.batch.computed[sequence.slot], f"slot {sequence.slot}: positions differ"
        prefix = ready.pool.prefix
        for block, item in enumerate(prefix._item):
            if item is not None:
                assert np.frombuffer(item.content, np.int32).tolist() == worker.tokens[block], f"block {block} differs"

    def settle(self) -> None:
        """Runs until every request has ended; then nothing may be left."""
        for _ in range(1000):
            if not self.jobs and not any(side.unanswered for side in self.sides):
                break
            self.send_masks()
            for group in range(len(self.sides)):
                self.open(group)
                self.plan(group)
                self.execute(group)
                self.deliver(group)
                self.restart_drained(group)
        else:
            raise Violation(f"requests without end: {sorted(self.jobs)}")
        self.core.check_invariants()
        load = self.core.load()
        assert load.counters.sampled_tokens == self.num_tokens
        assert load.queued == 0 and not self.core._life.by_key and not self.core._life.by_id
        for rest in load.groups.values():
            assert rest.running == 0 and rest.free_blocks == rest.total_blocks


def make_simulation(
    kind: type[Simulation] = Simulation,
    *,
    pools: Sequence[int] = (16,),
    depths: Sequence[int] | None = None,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 8,
    max_model_length: int = 24,
    **fields: int,
) -> Simulation:
    """A small machine: blocks of two tokens, one group of 16 blocks, two plans ahead, unless told otherwise."""
    config = CoreConfig(
        vocabulary_size=VOCABULARY_SIZE,
        max_model_length=max_model_length,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        hash_seed=1,
        **fields,
    )
    return kind(config, pools, depths or [2] * len(pools))
