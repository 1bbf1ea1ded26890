"""How long a sequence may become, and which pools can hold it. Knows nothing of what is running."""

from scheduler_svc.core.config import CoreConfig
from scheduler_svc.core.request import Request
from shared.errors import InvalidRequest


class Limits:
    """The model's length and the pools of the groups, those that are away and waited for included."""

    def __init__(self, config: CoreConfig) -> None:
        self._config = config
        self._pools: dict[int, int] = {}

    def set_pool(self, group: int, num_blocks: int) -> None:
        """A group's pool has this many blocks."""
        self._pools[group] = num_blocks

    def drop_pool(self, group: int) -> None:
        """A group is not waited for any more."""
        self._pools.pop(group, None)

    @property
    def context_limit(self) -> int:
        """Most tokens of a prompt and its output: min(model's, largest pool's); the model's while no pool is known."""
        if not self._pools:
            return self._config.max_model_length
        return min(self._config.max_model_length, self._capacity(max(self._pools.values())))

    def blocks_needed(self, length: int) -> int:
        """Blocks of a sequence of `length` tokens in the end: the last token's K/V is never computed."""
        return -(-(length - 1) // self._config.block_size)

    def _capacity(self, num_blocks: int) -> int:
        """The longest sequence, prompt and output, that so many blocks hold: the inverse of blocks_needed."""
        return num_blocks * self._config.block_size + 1

    def fits(self, length: int, num_blocks: int) -> bool:
        """Whether a pool of so many blocks can hold a sequence of `length` tokens, if it is alone."""
        return self.blocks_needed(length) <= num_blocks

    def fits_somewhere(self, length: int) -> bool:
        """The same for the largest pool; true while no pool is known."""
        return not self._pools or self.fits(length, max(self._pools.values()))

    def length_limit(self, request: Request) -> int:
        """Tokens of prompt and output at which the request ends by length. Raises InvalidRequest if it can never fit.

        An unset max_tokens goes up to the context limit, a large one up to the model's.
        """
        prompt, context = len(request.prompt), self.context_limit
        if prompt >= context:
            raise InvalidRequest("prompt", f"has {prompt} tokens, must be shorter than the context limit of {context}")
        if request.max_tokens is None:
            return context
        limit = min(prompt + request.max_tokens, self._config.max_model_length)
        if not self.fits_somewhere(limit):
            most = max(self._pools.values())
            raise InvalidRequest(
                "max_tokens",
                f"{request.max_tokens} after a prompt of {prompt} tokens needs {self.blocks_needed(limit)} K/V blocks "
                f"of {self._config.block_size} tokens, the largest pool has {most}: "
                f"at most {self._capacity(most) - prompt} fit",
            )
        return limit
