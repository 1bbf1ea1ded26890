"""What is counted of one worker group's steps, seen from the scheduler. Plain numbers; whoever exports reads them."""

from dataclasses import dataclass, field

from shared.histogram import ROWS, SHORT_S, SIZES, Histogram


@dataclass(slots=True)
class LinkCounts:
    """Totals since the start of the process, over all epochs of the group."""

    losses: int = 0
    """Times that it was lost: a stream that was connected and ended, but for one that drained."""
    busy_s: float = 0.0
    """Time that steps took on the worker."""
    working_s: float = 0.0
    """Time with a step planned and its result not here. While it was not busy, the worker waited or data travelled."""
    step_time: Histogram = field(default_factory=lambda: Histogram(SHORT_S))
    step_rows: Histogram = field(default_factory=lambda: Histogram(ROWS))
    plan_size: Histogram = field(default_factory=lambda: Histogram(SIZES))
    result_size: Histogram = field(default_factory=lambda: Histogram(SIZES))
    answered: float = 0.0
    """When the last result came."""

    def sent(self, size: int, rows: int) -> None:
        """A plan of `size` bytes went out."""
        self.plan_size.observe(size)
        if rows:
            self.step_rows.observe(rows)

    def came(self, now: float, sent: float, step_s: float, size: int, *, rows: bool) -> None:
        """The result of a plan that was sent at `sent`: of a step that took `step_s` seconds, where it had rows."""
        self.result_size.observe(size)
        if rows:
            self.step_time.observe(step_s)
            self.busy_s += step_s
            self.working_s += now - max(sent, self.answered)
        self.answered = now
