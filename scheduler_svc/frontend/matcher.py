"""Grammars compiled by llguidance, and the token masks they give. Knows nothing of requests, samples or time limits.

What llguidance is told of the model, and in which dialect, is decided here and nowhere else.
"""

import json
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from numpy.typing import NDArray
from tokenizers import Tokenizer

from scheduler_svc.frontend.grammar_errors import explained, shortened
from scheduler_svc.frontend.grammars import Grammar, with_options
from scheduler_svc.frontend.vocabulary import Vocabulary

Mask = NDArray[np.uint8]
"""[ceil(vocabulary size / 8)]: bit v % 8 of byte v // 8 is set if token v is allowed."""

MAX_LEXER_STATES = 50_000
"""Of one sample, 1 to 2 kB each; llguidance's own limit would allow 500 MB."""


class GrammarError(ValueError):
    """A grammar, or an output's way through it, is at fault. The message is for the caller."""


class GrammarTokenizer:
    """The model's tokens as llguidance needs them. Immutable; threads share it."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, vocabulary_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`vocabulary` is the tokenizer's. Takes most of a second for 150,000 tokens, and holds the interpreter."""
        self.vocabulary_size = vocabulary_size
        self.tokens: LLTokenizer | None = None
        """None for a model without end-of-sequence tokens: no grammar could end."""
        described = _Tokens(tokenizer, vocabulary, vocabulary_size, eos_token_ids)
        if eos_token_ids:
            self.tokens = LLTokenizer(TokenizerWrapper(described), eos_token=list(eos_token_ids))
        self.free: Mask = _mask(described.tokens, vocabulary_size, eos_token_ids)
        """All tokens but those that end an output."""


def _mask(tokens: Sequence[bytes], vocabulary_size: int, without: Sequence[int]) -> Mask:
    """Of the tokens that there are."""
    flags = np.zeros(-(-vocabulary_size // 8) * 8, dtype=np.uint8)
    flags[: len(tokens)] = [bool(token) for token in tokens]
    flags[list(without)] = 0
    return np.packbits(flags, bitorder="little")


class _Tokens:
    """What llguidance asks of a tokenizer. Ids of the model without a token stand for nothing: no mask allows them."""

    def __init__(
        self, tokenizer: Tokenizer, vocabulary: Vocabulary, vocabulary_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        known = max((*tokenizer.get_vocab(with_added_tokens=True).values(), *eos_token_ids))
        size = min(vocabulary_size, known + 1)
        added = tokenizer.get_added_tokens_decoder()
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(size)]
        self.special_token_ids = [token_id for token_id, token in added.items() if token.special and token_id < size]
        self.bos_token_id = None
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None
        self._special = frozenset(self.special_token_ids)
        self._bytes = {token: token_id for token_id, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of text that a grammar leaves no choice about, as the model would see it in a prompt.

        Byte by byte where that is other text (normalization) or reads like a special token, which it is not.
        """
        token_ids: list[int] = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        exact = b"".join(self.tokens[token_id] for token_id in token_ids) == text
        if exact and self._special.isdisjoint(token_ids):
            return token_ids
        return [self._bytes[text[index : index + 1]] for index in range(len(text))]


class Matcher:
    """A grammar and how far an output is through it. Not for two threads at a time; copies are independent."""

    def __init__(self, matcher: LLMatcher, mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes

    def copy(self) -> Self:
        """Another one at the same place. Cheap."""
        return type(self)(self._matcher.deep_copy(), self._mask_bytes)

    def consume(self, token_id: int) -> None:
        """The output's next token. Raises GrammarError if the grammar does not allow it here."""
        if not self._matcher.consume_token(token_id):
            raise GrammarError(shortened(self._matcher.get_error()))

    def allowed(self) -> Mask:
        """The tokens that may come next, end-of-sequence tokens where the output is complete; at least one.

        Raises GrammarError where nothing may come and the output is not complete, or where the grammar is too complex
        to tell.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarError(shortened(self._matcher.get_error()))
        mask = np.zeros(self._mask_bytes, dtype=np.uint8)
        size = min(len(bits), self._mask_bytes)
        mask[:size] = bits[:size]
        return mask


def compile_grammar(grammar: Grammar, tokenizer: GrammarTokenizer) -> Matcher:
    """At the beginning of an output. May take long: llguidance bounds its work only in part.

    Raises GrammarError with the parser's message, and for a grammar that allows nothing.
    """
    if tokenizer.tokens is None:
        raise GrammarError("the served model has no end-of-sequence token to end an output with")
    limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    compiled = LLMatcher(tokenizer.tokens, _translated(grammar), log_level=0, limits=limits)
    if compiled.is_error():
        raise GrammarError(explained(grammar, compiled.get_error()))
    matcher = Matcher(compiled, -(-tokenizer.vocabulary_size // 8))
    matcher.copy().allowed()
    return matcher


def _translated(grammar: Grammar) -> str:
    """In llguidance's own form."""
    try:
        if grammar.kind == "json_schema":
            return grammar_from("json_schema", json.dumps(with_options(_schema(grammar.text))))
        return grammar_from(grammar.kind, grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(shortened(str(error))) from None


def _schema(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise GrammarError(f"not JSON: {error}") from None
