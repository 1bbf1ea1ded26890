"""What each token id stands for, in bytes. Reads the tokenizer once; knows nothing of requests."""

from pathlib import Path

from tokenizers import Tokenizer, decoders

from shared.errors import StartupError


def load_tokenizer(folder: Path) -> Tokenizer:
    """The model folder's tokenizer. Raises StartupError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise StartupError(f"{path} is missing")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no narrower kind
        raise StartupError(f"{path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Vocabulary:
    """Bytes of every token of a byte-level BPE tokenizer, the kind that Qwen models have.

    Concatenating them is decoding: no token's text depends on its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises StartupError for another kind of tokenizer."""
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise StartupError("tokenizer.json: its decoder is not ByteLevel; only byte-level BPE is supported")
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._known: dict[int, bytes] = {}

    def text_bytes(self, token_id: int) -> bytes:
        """UTF-8 of the token as shown to people; nothing for special tokens and for ids without a token."""
        return b"" if token_id in self._special else self.token_bytes(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The same with the text of special tokens."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = bytes_of(self._tokenizer.id_to_token(token_id) or "")
        return known


def _byte_of_character() -> dict[str, int]:
    """The inverse of GPT-2's printable alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTES = _byte_of_character()


def bytes_of(token: str) -> bytes:
    """Bytes of one entry of the vocabulary; an added token outside the alphabet stands for its own text."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()
