"""A stream that loses its server goes on: through a real frontend before a core that ends calls on cue."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import tandem
from shared.pb import core_pb2, generation_pb2_grpc
from shared.pb import generation_pb2 as pb
from tandem import Client, Delta
from tandem.resume import Progress
from tests.client.conftest import Server
from tests.frontend.fake_core import Answer, failed, ids, length, pack_ints, stopped
from tests.patience import PATIENCE_S

LOST = failed(14, "this server shuts down; resume on another")


def _cutting(outputs: dict[int, list[int]], end: Callable[[], core_pb2.Ended], cuts: Iterator[int]) -> Callable:
    """A core that knows what each sample's whole output is, and ends a call after so many further tokens.

    Every admission finds something else in its prefix cache.
    """

    def answer(submit: core_pb2.Submit) -> Answer:
        rest = outputs[submit.sample_index][len(ids(submit.output)) :]
        cut = next(cuts, None)
        return (rest, end()) if cut is None or cut >= len(rest) else (rest[:cut], LOST)

    return answer


def _joined(deltas: list[Delta]) -> list[tuple[str, list[int], object, object]]:
    """What a caller has of each sample in the end."""
    samples = []
    for index in sorted({delta.index for delta in deltas}):
        mine = [delta for delta in deltas if delta.index == index]
        assert all(delta.finish is None and delta.usage is None for delta in mine[:-1])
        token_ids = [token for delta in mine for token in delta.token_ids]
        samples.append(("".join(delta.text for delta in mine), token_ids, mine[-1].finish, mine[-1].usage))
    return samples


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """Pauses are short: how long they are is tested without a clock."""
    monkeypatch.setattr("tandem.resume.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("tandem.resume.LONGEST_PAUSE_S", 0.001)
    with Client(server.endpoint) as client:
        yield client


TEXT = "fox 🙂 sea the quick 🙂🙂 brown fox jumps STOP over the lazy dog"


SLOW_MACHINE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW_MACHINE)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=8),
    n=st.integers(1, 3),
    stop=st.sampled_from([(), ("STOP",), ("x j", "ps STO"), ("never there",), (" 🙂🙂",)]),
    min_tokens=st.sampled_from([0, 5, 40]),
    how=st.sampled_from(["length", "stop token"]),
)
def test_a_stream_in_pieces_is_the_stream_in_one(
    server: Server,
    client: Client,
    tokenizer: Tokenizer,
    cuts: list[int],
    n: int,
    stop: tuple[str, ...],
    min_tokens: int,
    how: str,
) -> None:
    """Wherever it is cut: within a character, within a stop string, before the first token, after the last."""
    outputs = {index: [*tokenizer.encode(TEXT[index * 3 :]).ids, 420] for index in range(n)}
    end = length if how == "length" else lambda: stopped(420)
    options = {"n": n, "stop": stop, "min_tokens": min_tokens, "seed": 3}
    server.answer = _cutting(outputs, end, iter(()))
    undisturbed = _joined(list(client.generate("The", **options)))
    server.answer = _cutting(outputs, end, iter(cuts))
    assert _joined(list(client.generate("The", **options))) == undisturbed


def test_what_is_asked_again_differs_by_its_output_alone(server: Server, client: Client, tokenizer: Tokenizer) -> None:
    """The seed is the client's from the start, the id stays, max_tokens and min_tokens count from the prompt's end."""
    output = tokenizer.encode("fox sea the quick brown").ids
    server.answer = _cutting({0: [5, *output]}, length, iter([1, 0, 2]))
    stream = client.generate("The", max_tokens=20, min_tokens=2, output_token_ids=[5], temperature=0.5)
    assert [token for delta in stream for token in delta.token_ids] == output
    first, *others = server.core.submits
    assert [len(ids(submit.output)) for submit in (first, *others)] == [1, 2, 2, 4]
    assert first.sampling.seed and first.request_id == stream.request_id
    for submit in others:
        submit.output, submit.handle = first.output, first.handle
        assert submit == first


def test_cached_tokens_are_those_of_the_first_admission(server: Server, client: Client) -> None:
    found = itertools.count(7)

    def answer(submit: core_pb2.Submit) -> Answer:
        batch = core_pb2.TokenBatch(handles=pack_ints([submit.handle]), token_ids=pack_ints([9]))
        batch.started.add(handle=submit.handle, cached_tokens=next(found))
        server.core.send_batch(batch)
        return (), LOST if len(server.core.submits) < 3 else length()

    server.answer = answer
    (sample,) = client.complete("The").samples
    assert (sample.token_ids, sample.usage.cached_tokens, sample.usage.completion_tokens) == ((9, 9, 9), 7, 3)


def test_samples_that_are_done_are_not_asked_for_again(server: Server, client: Client) -> None:
    """Each of the others on its own: a server continues one sample a call."""

    def answer(submit: core_pb2.Submit) -> Answer:
        if len(server.core.submits) <= 3:
            return ([7], length()) if submit.sample_index == 1 else ([8], LOST if submit.sample_index == 2 else None)
        return [9], length()

    server.answer = answer
    samples = client.complete("The", n=3).samples
    assert [sample.token_ids for sample in samples] == [(8, 9), (7,), (8, 9)]
    assert {submit.sample_index for submit in server.core.submits[3:]} == {0, 2}


def test_a_full_queue_and_an_id_that_is_still_taken_pass_by(server: Server, client: Client) -> None:
    """A server may count the lost call as live until it notices the loss."""
    answers = iter([([7], LOST), ([], failed(6, "live")), ([], failed(8, "full", 1)), ([8], length())])
    server.answer = lambda submit: next(answers)
    assert client.complete("The").samples[0].token_ids == (7, 8)


def test_who_finds_the_queue_full_tries_again_when_the_server_says(server: Server, client: Client) -> None:
    answers = iter([([], failed(8, "full", 20)), ([], failed(8, "full", 20)), ([8], length())])
    server.answer = lambda submit: next(answers)
    assert client.complete("The").samples[0].token_ids == (8,)


@pytest.mark.parametrize(("code", "kind"), [(13, tandem.RequestFailed), (3, tandem.InvalidRequest)])
def test_other_errors_end_the_stream(server: Server, client: Client, code: int, kind: type[Exception]) -> None:
    server.answer = lambda submit: ([7], failed(code, "field: why"))
    with pytest.raises(kind, match="why"):
        client.complete("The")
    assert len(server.core.submits) == 1


def test_a_request_that_was_accepted_is_resumed_before_its_first_token(server: Server, client: Client) -> None:
    answers = iter([([], LOST), ([8], length())])
    server.answer = lambda submit: next(answers)
    assert client.complete("The").samples[0].token_ids == (8,)


def test_acceptance_counts_where_its_metadata_come_with_the_end(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's asyncio client then has no initial metadata."""
    monkeypatch.setattr(grpc.aio.AioRpcError, "initial_metadata", lambda _: grpc.aio.Metadata())
    answers = iter([([], LOST), ([], failed(8, "full", 1)), ([8], length())])
    server.answer = lambda submit: next(answers)

    async def asked() -> tuple[int, ...]:
        async with tandem.AsyncClient(server.endpoint) as client:
            return tuple((await client.complete("The")).samples[0].token_ids)

    assert asyncio.run(asked()) == (8,)


def test_patience_ends(server: Server) -> None:
    """Also where each server takes the request and dies of it."""
    server.answer = lambda submit: ([], LOST)
    with Client(server.endpoint, resume_timeout=0.3) as client, pytest.raises(tandem.Unavailable, match="shuts down"):
        client.complete("The")
    assert len(server.core.submits) > 1


def test_the_deadline_is_for_the_whole_request(server: Server, client: Client) -> None:
    server.answer = lambda submit: ([7], LOST)
    started = time.monotonic()
    with pytest.raises(tandem.DeadlineExceeded):
        client.complete("The", timeout=0.3)
    assert time.monotonic() - started >= 0.25


def test_closing_ends_the_pause_before_the_next_attempt(server: Server) -> None:
    server.answer = lambda submit: ([7], LOST)
    with Client(server.endpoint) as client:
        stream = client.generate("The")
        for number, _ in enumerate(stream):
            if number == 2:
                stream.close()
                break
        with pytest.raises(tandem.Aborted, match="closed"):
            list(stream)


def test_the_next_endpoint_is_tried_where_the_first_does_not_answer(server: Server, tokenizer: Tokenizer) -> None:
    server.answer = lambda submit: ([7], length())
    with Client(["127.0.0.1:1", server.endpoint, "127.0.0.1:2"]) as client:
        for _ in range(4):
            assert client.complete("The").samples[0].token_ids == (7,)
            assert client.tokenize("fox") == tokenizer.encode("fox").ids
    with Client(["127.0.0.1:1", "127.0.0.1:2"]) as client, pytest.raises(tandem.Unavailable):
        client.complete("The")


def test_an_abort_reaches_the_endpoint_that_has_the_request(server: Server, model: Path) -> None:
    other = Server(model)
    other.start()
    try:
        with Client([server.endpoint, other.endpoint, "127.0.0.1:1"]) as client, Client(server.endpoint) as owner:
            for _ in range(3):  # whichever is asked first
                stream = owner.generate("The")
                while not client.abort(stream.request_id):
                    time.sleep(0.005)
                with pytest.raises(tandem.Aborted):
                    list(stream)
            assert not client.abort("nobody")
    finally:
        other.stop()


def _first_of_prompt(index: int, number: int) -> pb.GenerateResponse:
    """A piece of what is told of the prompt, before any token."""
    response = pb.GenerateResponse(index=index, prompt_logprobs=[pb.TokenLogprob(token_id=number, rank=1)])
    if number == 0:
        response.echo.text = "The"
    return response


def test_what_is_told_of_the_prompt_is_told_once() -> None:
    """Cut before the first token, a server tells it again from its beginning."""
    progress = Progress(pb.GenerateRequest(n=2, output={"prompt_logprobs": 1, "echo": True}))  # type: ignore[arg-type]
    assert len(progress.remaining()) == 1
    told = [progress.take(_first_of_prompt(0, number)) for number in range(2)]
    (again,) = progress.remaining()
    assert again.n == 2
    told += [progress.take(_first_of_prompt(0, number)) for number in range(3)]
    progress.take(pb.GenerateResponse(index=1, token_ids=[7]))
    first, second = progress.remaining()
    assert first.output.HasField("prompt_logprobs") and not second.output.HasField("prompt_logprobs")
    told += [progress.take(_first_of_prompt(0, number)) for number in range(4)]
    told.append(progress.take(pb.GenerateResponse(index=1, echo={"text": "The"})))  # type: ignore[arg-type]
    assert [token.token_id for delta in told for token in delta.prompt_logprobs] == [0, 1, 2, 3]
    assert [delta.echo.text for delta in told if delta.echo is not None] == ["The"]


class Hanging(generation_pb2_grpc.GenerationServiceServicer):
    """Takes a call and never answers."""

    def __init__(self) -> None:
        self.taken, self.over = threading.Event(), threading.Event()

    def Generate(self, request, context):
        self.taken.set()
        self.over.wait(PATIENCE_S)
        return iter(())


def test_a_call_that_a_stopping_server_cancels_is_unavailable_and_not_aborted() -> None:
    """Nobody has aborted it: gRPC ends so what its server had no more time for."""
    hanging, server = Hanging(), grpc.server(ThreadPoolExecutor(1))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(hanging, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"127.0.0.1:{port}") as client:
        stream = client.generate("The")
        assert hanging.taken.wait(PATIENCE_S)
        server.stop(0)
        with pytest.raises(tandem.Unavailable):
            list(stream)
        hanging.over.set()
