"""One sample's tokens on their way to text: whole characters, stop strings, what may be shown already.

Owns the rule that at every moment the text given out is exactly the text of the ids given out. Knows nothing of
requests, clients or the core.
"""

import codecs
from collections import deque
from collections.abc import Iterable

from scheduler_svc.frontend.stop_strings import StopStrings
from scheduler_svc.frontend.vocabulary import Vocabulary

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Takes token ids one by one; gives out text and ids that have become certain. Constant amortised time a token.

    Texts concatenated are the decoding of all ids: bytes that are no character become U+FFFD as in
    tokenizer.decode, but half a character at the end waits for its other half.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: StopStrings,
        min_tokens: int,
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        """A stop string counts from output token number `min_tokens` on; `include_stop` shows what stopped."""
        self._bytes_of = vocabulary.text_bytes if skip_special_tokens else vocabulary.token_bytes
        self._stops = stops
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._decoder = _Utf8Decoder("replace")
        self._state = 0
        self._count = 0
        self._held_text = ""
        self._held_ids: list[int] = []
        self._boundaries: deque[tuple[int, int]] = deque()
        """Held tokens after which no character is split: (number of tokens, number of characters) up to their end."""
        self._text: list[str] = []
        self._ids: list[int] = []
        self._shown_characters = 0
        self._shown_tokens = 0

    def push(self, token_id: int) -> str | None:
        """Adds a token. Returns the stop string that it completed, if any.

        The text ends before a stop string that is found, or after it; only flush() may follow.
        """
        text = self._decoder.decode(self._bytes_of(token_id))
        self._held_ids.append(token_id)
        self._held_text += text
        stop = self._scan(text)
        if stop is not None:
            return stop
        held = self._stops.held[self._state]
        splits_character = bool(self._decoder.getstate()[0])
        if not held and not splits_character:
            self._show_all()
            return None
        if not splits_character:
            tokens = self._shown_tokens + len(self._held_ids)
            self._boundaries.append((tokens, self._shown_characters + len(self._held_text)))
        self._show_certain(held)
        return None

    def _scan(self, text: str) -> str | None:
        """Finds a stop string that ends in `text`, the last of what is held, and cuts it off with what follows."""
        if not self._stops:
            return None
        start = len(self._held_text) - len(text)
        for end, character in enumerate(text, start + 1):
            self._state = self._stops.step(self._state, character)
            stop = self._stops.matched[self._state]
            if stop is not None and self._shown_tokens + len(self._held_ids) >= self._min_tokens:
                self._held_text = self._held_text[: max(end - (0 if self._include_stop else len(stop)), 0)]
                self._decoder.reset()
                return stop
        return None

    def push_stop(self, token_id: int) -> None:
        """Adds the token that stopped the sample: an id without text, if that is not to be shown; only flush() may
        follow."""
        if self._include_stop:
            self._held_text += self._decoder.decode(self._bytes_of(token_id))
        self._held_ids.append(token_id)

    def skip(self, token_ids: Iterable[int]) -> str | None:
        """Adds first tokens that the client has already, with their text. The stop string that they completed."""
        stop = None
        for token_id in token_ids:
            stop = stop or self.push(token_id)
        self._show_all()
        self.take()
        return stop

    def flush(self) -> None:
        """The sample has ended: gives out all that is held, half a character as U+FFFD."""
        self._held_text += self._decoder.decode(b"", final=True)
        self._show_all()

    def take(self) -> tuple[str, list[int]]:
        """Text and ids that became certain since the last call."""
        text, ids = "".join(self._text), self._ids
        self._text, self._ids = [], []
        return text, ids

    @property
    def has_news(self) -> bool:
        """Whether take() would return ids. Text never comes without."""
        return bool(self._ids)

    def _show_all(self) -> None:
        self._text.append(self._held_text)
        self._ids += self._held_ids
        self._shown_characters += len(self._held_text)
        self._shown_tokens += len(self._held_ids)
        self._held_text = ""
        self._held_ids.clear()
        self._boundaries.clear()

    def _show_certain(self, held: int) -> None:
        """Gives out the tokens whose text ends before the last `held` characters."""
        certain = self._shown_characters + len(self._held_text) - held
        boundary = None
        while self._boundaries and self._boundaries[0][1] <= certain:
            boundary = self._boundaries.popleft()
        if boundary is None:
            return
        tokens, characters = boundary[0] - self._shown_tokens, boundary[1] - self._shown_characters
        self._text.append(self._held_text[:characters])
        self._ids += self._held_ids[:tokens]
        self._held_text = self._held_text[characters:]
        self._held_ids = self._held_ids[tokens:]
        self._shown_tokens, self._shown_characters = boundary
