"""The core's verbs. Owns every sequence and every decision; does no I/O and knows no clock."""

from dataclasses import replace

from scheduler_svc.core.cache_watch import CacheWatch
from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.draft import empty_plan
from scheduler_svc.core.draining import hand_over
from scheduler_svc.core.group import Group
from scheduler_svc.core.invariants import check_invariants
from scheduler_svc.core.lifecycle import Lifecycle
from scheduler_svc.core.limits import Limits
from scheduler_svc.core.outputs import GroupLoad, Load, RequeueCause, StepOutputs
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.quarantine import MOST_LOSSES, count_loss
from scheduler_svc.core.request import Request, Sequence
from scheduler_svc.core.request_checks import check_request
from scheduler_svc.core.results import apply_result
from shared.errors import DuplicateRequest, InvalidRequest, ProtocolError, QueueFull, RequestFailed, TandemError
from shared.types import FinishReason, StepPlan, StepResult


class Scheduler:
    """Sequences in, plans out, results in, tokens out."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self._groups: dict[int, Group] = {}
        self._limits = Limits(config)
        self._life = Lifecycle(self._groups)
        self._placement = Placement(config, self._limits, self._groups)
        self._planner = Planner(config, self._life, self._placement)
        self.cache_watch = CacheWatch(self._groups)
        """What the prefix caches gain and lose, for who watches."""
        self._epochs = 0
        self._arrivals = 0

    # Worker groups.

    def worker_ready(self, group: int, num_blocks: int) -> int:
        """Opens the group's next epoch with an empty pool of `num_blocks` blocks; an open one is lost first.

        Any number names a group. Returns the epoch: higher than every earlier one of this process, whatever the group.
        The group joins with its first result: until then it bounds no request and takes none from other groups.
        """
        self._close(group)
        self._epochs += 1
        self._groups[group] = Group(group, self._epochs, num_blocks, self.config)
        self.cache_watch.opened(self._groups[group])
        return self._epochs

    def _joined(self, group: Group) -> None:
        """Who waits and can no longer fit any pool, with this one known, ends."""
        self._limits.set_pool(group.number, group.pool.num_blocks)
        self._refit_waiting()

    def worker_lost(self, group: int) -> StepOutputs:
        """The group's sequences go back to the queue, ahead of who came later; its prefix cache is forgotten.

        A sequence that too many losses hit in flight, without a token between them, ends.
        """
        self._close(group)
        return self.take_outputs()

    def forget_group(self, group: int, error: TandemError) -> StepOutputs:
        """A group that is away is not waited for any more. Who waits and fits none of the others ends with `error`."""
        if group not in self._groups:
            self._limits.drop_pool(group)
            self._refit_waiting(error)
        return self.take_outputs()

    def _close(self, number: int) -> None:
        group = self._groups.get(number)
        if group is None:
            return
        for sequence in group.batch.running():
            fatal = group.in_flight(sequence) and count_loss(sequence, int(group.batch.known[sequence.slot]))
            self._life.requeue(group, sequence, RequeueCause.WORKER_LOST)
            self._life.counters.requeued += 1
            if fatal:
                self._life.counters.quarantined += 1
                self._life.end(sequence, RequestFailed(f"workers were lost {MOST_LOSSES} times while they computed it"))
        del self._groups[number]
        self.cache_watch.closed(number)

    def _refit_waiting(self, error: TandemError | None = None) -> None:
        """The pools have changed. Who fits none ends with the error, by default with what is wrong with its request."""
        for sequence in self._life.queue:
            if self._limits.fits_somewhere(sequence.limit):
                continue
            try:
                sequence.limit = self._limits.length_limit(sequence.request)
            except InvalidRequest as invalid:
                self._life.end(sequence, error or invalid)
            else:
                self._end_if_over(sequence)

    # Requests.

    def submit(self, request: Request) -> None:
        """Queues the request. Changes nothing when it raises InvalidRequest, DuplicateRequest or QueueFull.

        One whose given output already ends it (by its last token, or by its length) ends at once: the next
        StepOutputs say so.
        """
        check_request(request, self.config)
        limit = self._limits.length_limit(request)
        assert request.key not in self._life.by_key, f"key {request.key} is used twice"
        if request.sample_index in self._life.by_id.get(request.request_id, ()):
            raise DuplicateRequest(f"request_id: {request.request_id!r} is the id of a live request")
        if not request.again:
            self._require_room(len(request.prompt) + len(request.output))
        self._arrivals += 1
        sequence = Sequence(
            request=request,
            arrival=self._arrivals,
            limit=limit,
            output=request.output,
            sampling=request.row_sampling(),
            stop_ids=frozenset(request.stop_token_ids),
        )
        self._life.begin(sequence)
        self._end_if_over(sequence)

    def _require_room(self, tokens: int) -> None:
        queue = self._life.queue
        if len(queue) >= self.config.max_queue:
            raise QueueFull(f"{len(queue)} requests are waiting already: try again later")
        if len(queue) and queue.tokens + tokens > self.config.max_queue_tokens:
            raise QueueFull(f"{queue.tokens} tokens of requests are waiting already: try again later")

    def _end_if_over(self, sequence: Sequence) -> None:
        output = sequence.output
        if len(output) > sequence.request.min_tokens and int(output[-1]) in sequence.stop_ids:
            self._life.end(sequence, FinishReason.STOP_TOKEN, int(output[-1]))
        elif sequence.waiting_length >= sequence.limit:
            self._life.end(sequence, FinishReason.LENGTH)

    def abort(self, key: int) -> bool:
        """Forgets the sequence; its blocks are free at once, and no StepOutputs names it again. False if unknown."""
        sequence = self._life.by_key.get(key)
        if sequence is None:
            return False
        self._life.forget(sequence)
        self._life.outbox.drop(key)
        return True

    def expire(self, key: int, error: TandemError) -> bool:
        """Ends the sequence with the error if it was never admitted; whether it was so."""
        sequence = self._life.by_key.get(key)
        if sequence is None or sequence.started:
            return False
        self._life.end(sequence, error)
        return True

    def keys_of(self, request_id: str) -> list[int]:
        """The keys of the live samples of a public request id."""
        return list(self._life.by_id.get(request_id, {}).values())

    def mask_ready(self, key: int, position: int, allowed: bytes) -> None:
        """The tokens that a constrained sequence may sample as output token `position`: bit v % 8 of byte v // 8.

        Ignored for a sequence that is over. Raises ProtocolError where the sequence does not wait for it.
        """
        sequence = self._life.by_key.get(key)
        if sequence is None:
            return
        group = self._groups[sequence.group] if sequence.group is not None else None
        known = int(group.batch.known[sequence.slot]) if group is not None else sequence.waiting_length
        expected = known - len(sequence.request.prompt)
        if not sequence.request.constrained or position != expected:
            raise ProtocolError(f"mask for output token {position} of sequence {key}, which has {expected}")
        if len(allowed) != -(-self.config.vocabulary_size // 8):
            raise ProtocolError(f"mask of {len(allowed)} bytes for {self.config.vocabulary_size} tokens")
        sequence.mask, sequence.mask_position = allowed, position
        if group is not None and sequence.slot not in group.prefilling:
            group.masked[sequence.slot] = sequence

    def flush_cache(self) -> bool:
        """Forgets every cached prefix; False, and nothing is forgotten, while a sequence is live."""
        if self._life.by_key:
            return False
        for group in self._groups.values():
            group.pool.prefix.forget_all()
        return True

    # Steps.

    def schedule(self, group: int, *, patient: bool = False) -> StepPlan | None:
        """The group's next plan, any number of plans ahead of results; None where there is nothing to compute.

        With `patient`, constrained sequences that nothing else decodes beside wait for each other's masks and step
        together. Where no result is to come any more the caller must end the wait, soon, by not being patient.
        """
        ready = self._groups.get(group)
        return self._planner.plan(ready, patient) if ready is not None else None

    def is_gathering(self, group: int) -> bool:
        """Whether a sequence waits for the masks of others."""
        return group in self._groups and self._groups[group].is_gathering

    def heartbeat(self, group: int) -> StepPlan:
        """The group's next plan without rows."""
        return empty_plan(self._groups[group])

    def update(self, group: int, result: StepResult) -> StepOutputs:
        """Applies the result of the group's oldest plan; one of an earlier epoch is ignored.

        What a group that joins or drains brings about for others is told by the next `take_outputs`. Raises
        ProtocolError, and changes nothing, where the result is not that plan's.
        """
        ready = self._groups.get(group)
        if ready is None or ready.epoch != result.epoch:
            return self.take_outputs()
        joins = not ready.has_joined
        outputs = apply_result(ready, result, self._life)
        if joins:
            self._joined(ready)
        if ready.draining:
            hand_over(ready, self._groups, self._life, self._placement, self._limits)
        return outputs

    def take_outputs(self) -> StepOutputs:
        """Starts and ends that came about outside of `update`, for who can't wait for the next result."""
        return self._life.outbox.take()

    def end_all(self, error: TandemError) -> StepOutputs:
        """Ends every live sequence with the error."""
        for sequence in list(self._life.by_key.values()):
            self._life.end(sequence, error)
        return self.take_outputs()

    # What is going on.

    @property
    def context_limit(self) -> int:
        """Most tokens of a prompt and its output: min(model's, largest pool's); the model's while no pool is known."""
        return self._limits.context_limit

    @property
    def num_live(self) -> int:
        """Sequences that the core knows, waiting and running."""
        return len(self._life.by_key)

    def load(self) -> Load:
        """How busy the core is."""
        groups = {
            number: GroupLoad(
                running=group.batch.num_running,
                total_blocks=group.pool.num_blocks,
                free_blocks=group.pool.num_free,
                draining=group.draining,
            )
            for number, group in self._groups.items()
        }
        return Load(len(self._life.queue), groups, replace(self._life.counters))

    def check_invariants(self) -> None:
        """Asserts that all state is consistent. O(everything): for tests, and in production on request."""
        check_invariants(self._life, self._groups, self.config)
