"""Applies step results: tokens to their sequences, ends, and failed rows."""

import numpy as np

from scheduler_svc.core.group import Group, PendingPlan
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.logprobs import NO_LOGPROBS, TokenLogprobs
from scheduler_svc.core.outputs import RequeueCause, StepOutputs
from scheduler_svc.core.request import Sequence
from shared.errors import ProtocolError, RequestFailed
from shared.types import FinishReason, IntArray, StepResult


def apply_result(group: Group, result: StepResult, life: Lifecycle) -> StepOutputs:
    """The group's oldest plan was executed. Raises ProtocolError, and changes nothing, if the result is not its."""
    plan, stops = _checked(group, result)
    batch = group.batch
    group.pending.popleft()
    group.answered = plan.step_id
    group.draining = result.draining
    failed = [_fail(group, plan, row, life) for row in result.failed_rows.tolist()].count(True)
    if plan.prompt_rows:
        _tell_prompts(group, plan, result.prompt_logprobs, life)
    slots, keys, token_ids = plan.slots, plan.keys, result.token_ids
    logprobs = TokenLogprobs(plan.logprob_sizes, result.logprobs) if result.logprobs else NO_LOGPROBS
    if plan.departures != batch.departures:
        fresh = batch.generations[slots] == plan.generations
        life.counters.stale_rows += len(slots) - int(np.count_nonzero(fresh)) - failed
        slots, keys, token_ids, stops = slots[fresh], keys[fresh], token_ids[fresh], stops[fresh]
        logprobs = logprobs.select(fresh)
    if not len(slots):
        return life.outbox.take()
    life.counters.sampled_tokens += len(slots)
    known = batch.known[slots]
    batch.tokens[slots, known] = token_ids
    known += 1
    batch.known[slots] = known
    group.publish_ready()
    for row in np.logical_or(known == batch.limit[slots], stops).nonzero()[0].tolist():
        _end_if_over(batch.at(slots[row]), int(token_ids[row]), int(known[row]), life)
    return life.outbox.take(keys, token_ids, logprobs)


def _tell_prompts(group: Group, plan: PendingPlan, entries: bytes, life: Lifecycle) -> None:
    """A sequence that has left its slot meanwhile gets them when it is computed again."""
    at = 0
    for row in plan.prompt_rows:
        own, at = entries[at : at + row.size], at + row.size
        if group.batch.generations[row.slot] == row.generation:
            row.sequence.prompt_logprobs_from = row.end
            life.outbox.tell_prompt(row.sequence.request.key, own)


def _checked(group: Group, result: StepResult) -> tuple[PendingPlan, IntArray]:
    """The plan, and for each row how many running sequences its token would end."""
    if not group.pending or group.pending[0].step_id != result.step_id:
        expected = group.pending[0].step_id if group.pending else "none"
        raise ProtocolError(f"result of step {result.step_id} out of order: expected {expected}")
    plan = group.pending[0]
    if len(result.token_ids) != len(plan.slots):
        raise ProtocolError(
            f"result of step {result.step_id} has {len(result.token_ids)} tokens for {len(plan.slots)} sampling rows"
        )
    try:
        stops = group.batch.stop_counts.take(result.token_ids.view(np.uint32))  # a negative id is out of range too
    except IndexError:
        raise ProtocolError(f"result of step {result.step_id} has a token outside the vocabulary") from None
    _check_logprobs(plan, result)
    if not all(0 <= row < len(plan.slots) for row in result.failed_rows.tolist()):
        raise ProtocolError(f"result of step {result.step_id} has failed rows that are not in the plan")
    return plan, stops


def _check_logprobs(plan: PendingPlan, result: StepResult) -> None:
    expected = int(plan.logprob_sizes.sum()) if plan.logprob_sizes.size else 0
    if len(result.logprobs) != expected:
        raise ProtocolError(f"result of step {result.step_id} has not {expected} bytes of logprobs")
    expected = sum(row.size for row in plan.prompt_rows) if plan.prompt_rows else 0
    if len(result.prompt_logprobs) != expected:
        raise ProtocolError(f"result of step {result.step_id} has not {expected} bytes of prompt_logprobs")


def _end_if_over(sequence: Sequence, token: int, known: int, life: Lifecycle) -> None:
    num_before = known - 1 - len(sequence.request.prompt)
    if token in sequence.stop_ids and num_before >= sequence.request.min_tokens:
        life.end(sequence, FinishReason.STOP_TOKEN, token)
    elif known == sequence.limit:
        life.end(sequence, FinishReason.LENGTH)


def _fail(group: Group, plan: PendingPlan, row: int, life: Lifecycle) -> bool:
    """Ends the request of a row whose logits had no finite maximum; False if the row is stale.

    Others that hold a block of its may have read NaN, and written it into blocks of theirs. They are computed again
    in clean blocks: whoever fails by itself then ends too.
    """
    slot = int(plan.slots[row])
    if group.batch.generations[slot] != plan.generations[row]:
        return False
    sequence = group.batch.at(slot)
    touched, tainted = _sharing(group, sequence)
    life.end(sequence, RequestFailed("the model gave no finite logits for this request"))
    life.counters.failed_rows += 1
    for other in touched:
        life.requeue(group, other, RequeueCause.TAINTED)
    group.pool.taint(tainted)
    return True


def _sharing(group: Group, sequence: Sequence) -> tuple[list[Sequence], set[int]]:
    """The others that hold a block of the sequence, or a block of such a one, and so on; and all their blocks."""
    blocks = set(sequence.table)
    others = [other for other in group.batch.running() if other is not sequence]
    sharing: list[Sequence] = []
    while touched := [other for other in others if other not in sharing and not blocks.isdisjoint(other.table)]:
        sharing += touched
        blocks.update(*(other.table for other in touched))
    return sharing, blocks
