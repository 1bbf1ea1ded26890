"""The core's fixed parameters. Knows nothing of command lines or of how a worker is asked for its own."""

from dataclasses import dataclass

from shared.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Raises StartupError where the values contradict each other."""

    vocabulary_size: int
    """Number of token ids; every id is within [0, vocabulary_size)."""
    max_model_length: int
    """Most tokens of a prompt and its output that the model's positions allow."""
    block_size: int
    """Tokens per K/V block, the same in all groups."""
    max_num_seqs: int
    """Slots of each group: most sequences that run there at a time."""
    max_num_batched_tokens: int
    """Most tokens that one plan computes. At least max_num_seqs, so that no decode row ever waits."""
    max_queue: int = 4096
    """Most sequences that wait for admission; further ones are refused."""
    max_queue_tokens: int = 1 << 24
    """Most known tokens of all that wait; whoever finds nobody waiting is taken whatever its length."""
    look_past_steps: int = 64
    """How many steps may admit others past a waiting sequence that does not fit."""
    max_plan_bytes: int = 1 << 20
    """Size on the wire that no plan exceeds."""
    hash_seed: int
    """Seed of the prefix cache's hash, 64 bits, drawn at random by each process."""

    def __post_init__(self) -> None:
        names = ("vocabulary_size", "max_model_length", "block_size", "max_num_seqs", "max_queue", "max_queue_tokens")
        for name in names:
            if getattr(self, name) < 1:
                raise StartupError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs})"
            )
        if self.max_plan_bytes < self._least_plan_bytes():
            raise StartupError(f"max_plan_bytes must be at least {self._least_plan_bytes()}, not {self.max_plan_bytes}")

    def _least_plan_bytes(self) -> int:
        """Four times what a row and a new block for every slot, one mask and one cached sequence take: a quarter is
        theirs, another one for what is told of one sequence, half for tokens."""
        slots, mask, table = (
            24 * self.max_num_seqs,
            self.vocabulary_size // 8,
            4 * self.max_model_length // self.block_size,
        )
        return 4 * (slots + mask + table + 2048)

    @property
    def max_told_tokens(self) -> int:
        """Most cached tokens of a sequence that looks back at them: its admission tells them, 4 bytes each."""
        return self.max_plan_bytes // 32

    @property
    def max_rules_bytes(self) -> int:
        """Most that the lists of a sequence's logit rules take on the wire."""
        return self.max_plan_bytes // 8

    @property
    def max_plan_tokens(self) -> int:
        """Most tokens of one plan: their ids and new blocks take at most half of max_plan_bytes.

        A token takes at most 16 bytes, in blocks of one token: its id (4), its block (8), that block zeroed (4).
        """
        return min(self.max_num_batched_tokens, self.max_plan_bytes // 32)

    @property
    def max_plan_masks(self) -> int:
        """Masks that one plan has room for, in the half of max_plan_bytes that is not for tokens."""
        return (self.max_plan_bytes // 2 - 24 * self.max_num_seqs) // (-(-self.vocabulary_size // 8) + 16)
