"""What the client library tells of single tokens and of the prompt: plain frozen values, made from protobuf here."""

from collections.abc import Iterable
from dataclasses import dataclass

from shared.pb import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, how likely it was, and what else was likely in its place."""

    token_id: int
    text: str
    """That of special tokens too; bytes that are no whole character become U+FFFD."""
    bytes: tuple[int, ...]
    """The same exactly: the bytes of several tokens may make one character."""
    logprob: float | None
    """Natural logarithm of its probability; None for the first token of a prompt, which nothing precedes."""
    rank: int
    """One more than the number of tokens that were likelier; 0 where `logprob` is None."""
    top_logprobs: tuple["TokenLogprob", ...] = ()
    """The most likely tokens in its place, the likeliest first."""


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The prompt as it was computed."""

    text: str
    """Of chat messages, what the template made of them."""
    token_ids: tuple[int, ...]


def logprobs_from_pb(messages: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """In order."""
    return tuple(
        TokenLogprob(
            token_id=message.token_id,
            text=message.text,
            bytes=tuple(message.bytes),
            logprob=message.logprob if message.HasField("logprob") else None,
            rank=message.rank,
            top_logprobs=logprobs_from_pb(message.top_logprobs),
        )
        for message in messages
    )


def echo_from_pb(message: pb.EchoedPrompt) -> EchoedPrompt:
    """The same as a value."""
    return EchoedPrompt(message.text, tuple(message.token_ids))
