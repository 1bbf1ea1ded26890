"""What the client library takes and gives: plain frozen values, made from protobuf here and nowhere else."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, Literal, TypeVar

from shared.pb import generation_pb2 as pb
from tandem.token_values import EchoedPrompt, TokenLogprob, echo_from_pb, logprobs_from_pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys as the model's chat template sees them, for instance tool_calls or reasoning_content."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sample ended."""

    reason: Literal["stop", "length"]
    matched: str | int | None
    """The stop string that appeared or the token that stopped it; None where `reason` is length."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sample."""

    prompt_tokens: int
    completion_tokens: int
    """The token that stopped it and those given to resume included."""
    cached_tokens: int
    """Tokens of the prompt that were in the prefix cache."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of one sample. Concatenated in order, texts and ids are the whole output."""

    index: int
    """Which of the request's samples it belongs to."""
    text: str
    """Never half a character, never the beginning of a stop string."""
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    """Set in the last delta of each sample."""
    usage: Usage | None = None
    """Set in the last delta of each sample."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's next tokens, if they were asked for: in deltas of the first sample."""
    echo: EchoedPrompt | None = None
    """In the first delta of the stream, if it was asked for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, whole."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `token_ids`, if they were asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token of the prompt, if they were asked for: of the first sample."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A request's samples, whole, in order of their index."""

    request_id: str
    seed: int
    """Repeats the output when given again."""
    samples: tuple[Sample, ...]
    prompt: EchoedPrompt | None = None
    """If `echo` asked for it."""

    @property
    def text(self) -> str:
        """Text of the first sample: of the only one unless `n` asked for more."""
        return self.samples[0].text


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model and its limits."""

    model_name: str
    fingerprint: str
    """Hash of the model's configuration."""
    architecture: str
    vocabulary_size: int
    max_context_length: int
    """Most tokens of a prompt and its output together."""
    eos_token_ids: tuple[int, ...]
    dtype: str
    server_version: str


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """How busy one worker group is."""

    endpoint: str
    connected: bool
    running: int
    total_blocks: int
    free_blocks: int
    draining: bool = False
    """It gets no new requests: it is about to leave."""
    problem: str = ""
    """Why it is not connected."""
    refused: bool = False
    """It is there, but does not fit the scheduler or the workers that serve."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the service was at most half a second ago, in requests."""

    queued: int
    running: int
    max_running: int
    workers: tuple[WorkerLoad, ...]


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request that has ended."""

    request_id: str
    outcome: str
    """stop or length as of its last sample, else cancelled, invalid_request and the like."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    """Over all samples."""
    first_token_ms: float
    total_ms: float
    age_s: float
    """Seconds since its end."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a service has done since its core process started."""

    load: Load
    uptime_s: float
    prompt_tokens: int
    """Of admitted prompts, without those that were cached."""
    generation_tokens: int
    preemptions: int
    """Sequences put back to the queue for lack of K/V blocks."""
    replays: int
    """Sequences put back to the queue because their worker was lost."""
    requests: int
    """Requests that ended, however they did."""
    latest: tuple[RequestStats, ...]
    """Newest first."""


def delta_from_pb(response: pb.GenerateResponse) -> Delta:
    """One message of the stream."""
    return Delta(
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        finish=_finish(response.finish) if response.HasField("finish") else None,
        usage=_copy(Usage, response.usage) if response.HasField("usage") else None,
        logprobs=logprobs_from_pb(response.logprobs),
        prompt_logprobs=logprobs_from_pb(response.prompt_logprobs),
        echo=echo_from_pb(response.echo) if response.HasField("echo") else None,
    )


def _finish(finish: pb.Finish) -> Finish:
    if finish.reason == pb.FINISH_REASON_LENGTH:
        return Finish("length", None)
    return Finish("stop", finish.stop if finish.WhichOneof("matched") == "stop" else finish.token_id)


def completion_from(request_id: str, seed: int, deltas: Iterable[Delta]) -> Completion:
    """Joins the deltas of a whole stream."""
    pieces: dict[int, list[Delta]] = {}
    echo = None
    for delta in deltas:
        echo = echo or delta.echo
        pieces.setdefault(delta.index, []).append(delta)
    return Completion(request_id, seed, tuple(_joined(pieces[index]) for index in sorted(pieces)), echo)


def _joined(deltas: list[Delta]) -> Sample:
    finish, usage = deltas[-1].finish, deltas[-1].usage
    assert finish is not None and usage is not None, "a stream that ended well has finished every sample"
    token_ids, logprobs, prompt_logprobs = (
        tuple(chain.from_iterable(getattr(delta, name) for delta in deltas))
        for name in ("token_ids", "logprobs", "prompt_logprobs")
    )
    text = "".join(delta.text for delta in deltas)
    return Sample(deltas[0].index, text, token_ids, finish, usage, logprobs, prompt_logprobs)


def model_info_from_pb(response: pb.GetModelInfoResponse) -> ModelInfo:
    """The answer to GetModelInfo."""
    return _copy(ModelInfo, response, eos_token_ids=tuple(response.eos_token_ids))


def load_from_pb(response: pb.GetLoadResponse) -> Load:
    """The answer to GetLoad."""
    return _copy(Load, response, workers=tuple(_copy(WorkerLoad, worker) for worker in response.workers))


def stats_from_pb(response: pb.GetStatsResponse) -> Stats:
    """The answer to GetStats."""
    latest = tuple(_copy(RequestStats, request) for request in response.latest)
    return _copy(Stats, response, load=load_from_pb(response.load), latest=latest)


def _copy(kind: type[T], message: Any, **converted: Any) -> T:
    """A value whose fields are those of the message, some of them converted."""
    names = {member.name for member in fields(kind)} - converted.keys()  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **converted)
