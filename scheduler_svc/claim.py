"""What a scheduler says of itself to its peers, and which of two is the stronger. Values alone; see election."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Claim:
    """What a scheduler says of itself."""

    scheduler: int
    """Its id."""
    leading: bool = False
    """It dials the workers."""
    serving: bool = False
    """It holds at least one, and none that it knows of is in other hands."""
    candidate: bool = True
    """It would lead."""
    term: int = 0
    """The number of its claim; of the last one that it has heard of where it does not lead."""
    reaching: bool = False
    """A worker that it could use answers it, whoever has it."""

    @property
    def strength(self) -> tuple[bool, int, int]:
        """Of two that lead, the greater one goes on."""
        return self.serving, self.term, -self.scheduler

    @property
    def precedence(self) -> tuple[bool, int]:
        """Of two candidates, the greater one claims."""
        return self.reaching, -self.scheduler
