"""Generate through gRPC: what a client gets for what the core gives."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from tokenizers import Tokenizer

from shared.pb import core_pb2, generation_pb2_grpc
from shared.pb import generation_pb2 as pb
from tests.frontend.fake_core import failed, ids, length, pack_ints, ready_state, stopped, until
from tests.frontend.harness import collect, rest, run, serving


def _request(text: str = "The quick", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)


def _joined(responses: list[pb.GenerateResponse]) -> tuple[str, list[int]]:
    return "".join(r.text for r in responses), [i for r in responses for i in r.token_ids]


def _characters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each character of the vocabulary's alphabet."""
    return [tokenizer.get_vocab()[character.replace(" ", "Ġ")] for character in text]


def test_a_stream_is_the_core_s_tokens_and_their_text(model: Path, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("brown fox 🙂 日本語").ids

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(request_id="r1", sampling=pb.SamplingParams(seed=7)))
            (submit,) = await served.core.submitted()
            assert ids(submit.prompt) == tokenizer.encode("The quick").ids
            served.core.give(submit, output[:1], cached_tokens=64)
            first = await call.read()
            assert (first.request_id, first.seed) == ("r1", 7)
            for token in output[1:]:
                served.core.give(submit, [token])
            served.core.give(submit, [], length())
            others = await rest(call)
            responses = [first, *others]
            assert _joined(responses) == ("brown fox 🙂 日本語", output)
            assert not any("�" in r.text or r.request_id or r.seed for r in others)
            assert responses[-1].finish == pb.Finish(reason=pb.FINISH_REASON_LENGTH)
            assert responses[-1].usage == pb.Usage(
                prompt_tokens=len(ids(submit.prompt)), completion_tokens=len(output), cached_tokens=64
            )

    run(scenario())


def test_request_id_and_seed_are_made_where_the_client_gave_none(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, lambda submit: ((1,), length())) as served:
            responses = [(await collect(served.stub.Generate(_request())))[0] for _ in range(2)]
            assert len({r.request_id for r in responses}) == len({r.seed for r in responses}) == 2
            assert [r.request_id for r in responses] == [s.request_id for s in served.core.submits]

    run(scenario())


def test_the_token_that_stops_is_an_id_without_text(model: Path, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("fox.").ids
    stop = output[-1]

    async def scenario() -> None:
        async with serving(model, lambda submit: (output, stopped(stop))) as served:
            request = _request(stopping=pb.StoppingParams(stop_token_ids=[stop]))
            responses = await collect(served.stub.Generate(request))
            assert _joined(responses) == (tokenizer.decode(output[:-1]), output)
            assert responses[-1].finish == pb.Finish(reason=pb.FINISH_REASON_STOP, token_id=stop)
            assert responses[-1].usage.completion_tokens == len(output)

    run(scenario())


@pytest.mark.parametrize("text", ["brown STOP fox", "brown STOP, and more"])
def test_a_stop_string_over_several_tokens_ends_the_sample_before_it(
    text: str, model: Path, tokenizer: Tokenizer
) -> None:
    output = _characters(tokenizer, text)

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(stopping=pb.StoppingParams(stop=["STOP", "never"])))
            (submit,) = await served.core.submitted()
            for token in output:
                served.core.give(submit, [token], cached_tokens=0)
                await asyncio.sleep(0.001)
            responses = await collect(call)
            assert _joined(responses) == ("brown ", output[: len("brown STOP")])
            assert not any("S" in r.text for r in responses)
            assert responses[-1].finish == pb.Finish(reason=pb.FINISH_REASON_STOP, stop="STOP")
            assert responses[-1].usage.completion_tokens == len("brown STOP")
            await until(lambda: served.core.cancelled == [submit.handle])

    run(scenario())


def test_a_stop_string_inside_one_token_cuts_what_follows_it(model: Path, tokenizer: Tokenizer) -> None:
    shells = next(t for t in range(512) if tokenizer.decode([t]).startswith(" shells"))

    async def scenario() -> None:
        async with serving(model, lambda submit: ((shells,), None)) as served:
            responses = await collect(served.stub.Generate(_request(stopping=pb.StoppingParams(stop=["el"]))))
            assert _joined(responses) == (" sh", [shells])

    run(scenario())


def test_what_was_held_back_for_a_stop_string_is_given_out_at_the_end(model: Path, tokenizer: Tokenizer) -> None:
    output = _characters(tokenizer, "STO")

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(stopping=pb.StoppingParams(stop=["STOP"])))
            (submit,) = await served.core.submitted()
            served.core.give(submit, output)
            served.core.give(submit, (), length())
            (response,) = await collect(call)
            assert (response.text, list(response.token_ids)) == ("STO", output)
            assert response.finish.reason == pb.FINISH_REASON_LENGTH

    run(scenario())


def test_stop_strings_wait_for_min_tokens(model: Path, tokenizer: Tokenizer) -> None:
    output = _characters(tokenizer, "xaxa")

    async def scenario() -> None:
        async with serving(model, lambda submit: (output, None)) as served:
            request = _request(stopping=pb.StoppingParams(stop=["a"], min_tokens=3))
            responses = await collect(served.stub.Generate(request))
            assert _joined(responses) == ("xax", output)
            assert served.core.submits[0].min_tokens == 3

    run(scenario())


def test_half_a_character_at_the_prompt_s_end_leaks_nothing_of_the_prompt(model: Path, tokenizer: Tokenizer) -> None:
    emoji = _characters(tokenizer, "ðŁĻĤ")

    async def scenario() -> None:
        async with serving(model, lambda submit: ([*emoji[2:], *emoji], length())) as served:
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=emoji[:2]))
            text, output = _joined(await collect(served.stub.Generate(request)))
            assert text == tokenizer.decode(output)
            assert text.endswith("🙂") and text.count("🙂") == 1

    run(scenario())


def test_n_samples_come_on_one_stream_each_with_its_own_end(model: Path, tokenizer: Tokenizer) -> None:
    texts = {0: "fox", 1: "dog.", 2: "sea shells"}

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(n=3))
            submits = await served.core.submitted(3)
            outputs = {s.sample_index: tokenizer.encode(texts[s.sample_index]).ids for s in submits}
            for step in range(10):
                for submit in submits:
                    token = outputs[submit.sample_index][step : step + 1]
                    ended = length() if step == len(outputs[submit.sample_index]) else None
                    served.core.give(submit, token, ended)
            responses = await collect(call)
            for index, text in texts.items():
                mine = [r for r in responses if r.index == index]
                assert _joined(mine) == (text, outputs[index])
                assert [r.HasField("finish") for r in mine] == [False] * (len(mine) - 1) + [True]
            assert len({r.request_id for r in responses if r.request_id}) == 1

    run(scenario())


def test_resuming_goes_on_after_the_ids_given(model: Path, tokenizer: Tokenizer) -> None:
    before, after = tokenizer.encode("brown").ids, tokenizer.encode(" fox").ids

    async def scenario() -> None:
        async with serving(model, lambda submit: (after, length())) as served:
            responses = await collect(served.stub.Generate(_request(output_token_ids=pb.TokenIds(ids=before))))
            assert ids(served.core.submits[0].output) == before
            assert _joined(responses) == (" fox", after)
            assert responses[-1].usage.completion_tokens == len(before) + len(after)

    run(scenario())


def test_resuming_what_had_ended_by_a_stop_string_ends_at_once(model: Path, tokenizer: Tokenizer) -> None:
    before = tokenizer.encode("brown").ids

    async def scenario() -> None:
        async with serving(model) as served:
            request = _request(output_token_ids=pb.TokenIds(ids=before), stopping=pb.StoppingParams(stop=["wn"]))
            (response,) = await collect(served.stub.Generate(request))
            assert response.finish == pb.Finish(reason=pb.FINISH_REASON_STOP, stop="wn")
            assert (response.text, list(response.token_ids)) == ("", [])
            assert served.core.submits == []

    run(scenario())


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "stopping.max_tokens: can never fit"),
        (grpc.StatusCode.ALREADY_EXISTS, "a live request has the id r1"),
        (grpc.StatusCode.UNAVAILABLE, "no worker for 60 s"),
        (grpc.StatusCode.INTERNAL, "the logits of this request are not finite"),
        (grpc.StatusCode.CANCELLED, "aborted by its id"),
    ],
)
def test_the_core_s_failure_is_the_status_of_that_call_alone(
    code: grpc.StatusCode, message: str, model: Path, tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            failing = served.stub.Generate(_request(n=2))
            first, second = await served.core.submitted(2)
            other = served.stub.Generate(_request())
            (third,) = (await served.core.submitted(3))[-1:]
            served.core.give(first, [5])
            served.core.give(first, (), failed(code.value[0], message))
            with pytest.raises(aio.AioRpcError) as error:
                await collect(failing)
            assert (error.value.code(), error.value.details()) == (code, message)
            await until(lambda: served.core.cancelled == [second.handle])
            served.core.give(third, [6], length())
            assert _joined(await collect(other)) == (tokenizer.decode([6]), [6])

    run(scenario())


def test_a_full_queue_tells_when_to_try_again(model: Path) -> None:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    async def scenario() -> None:
        async with serving(model, lambda submit: ((), failed(code.value[0], "queue full", 1500))) as served:
            with pytest.raises(aio.AioRpcError) as error:
                await collect(served.stub.Generate(_request()))
            assert error.value.code() == code
            trailers = dict(error.value.trailing_metadata() or ())
            assert trailers["grpc-retry-pushback-ms"] == "1500"
            status, hint = status_pb2.Status(), error_details_pb2.RetryInfo()
            status.ParseFromString(trailers["grpc-status-details-bin"])
            assert (status.code, status.message) == (code.value[0], "queue full")
            assert status.details[0].Unpack(hint) and hint.retry_delay.ToMilliseconds() == 1500

    run(scenario())


def test_a_slow_reader_gets_everything_in_few_messages_and_holds_up_nobody(model: Path, tokenizer: Tokenizer) -> None:
    steps = 200
    words = tokenizer.encode(" shells").ids[:1] * 400

    async def scenario() -> None:
        async with serving(model) as served:
            small_window = [("grpc.http2.bdp_probe", 0)]
            async with aio.insecure_channel(f"127.0.0.1:{served.frontend.port}", small_window) as channel:
                slow = generation_pb2_grpc.GenerationServiceStub(channel).Generate(_request())
                (submit,) = await served.core.submitted()
                for _ in range(steps):
                    served.core.give(submit, words)
                quick = served.stub.Generate(_request())
                (other,) = (await served.core.submitted(2))[-1:]
                served.core.give(other, words, length())
                assert _joined(await collect(quick))[1] == words
                served.core.give(submit, (), length())
                responses = await collect(slow)
            assert _joined(responses)[1] == words * steps
            assert len(responses) < steps / 2

    run(scenario())


def test_a_core_that_is_faster_than_the_writers_does_not_starve_them(model: Path) -> None:
    """A stream that ended before a flood for another reaches its client before the flood has been taken in."""

    async def scenario() -> None:
        async with serving(model) as served:
            calls = [served.stub.Generate(_request()) for _ in range(2)]
            first, flooded = await served.core.submitted(2)
            served.core.give(first, [7], length())
            for _ in range(3_000):
                served.core.give(flooded, [8])
            served.core.tell(ready_state(queued=1))
            served.core.give(flooded, (), length())
            await asyncio.wait([asyncio.create_task(collect(c)) for c in calls], return_when=asyncio.FIRST_COMPLETED)
            assert served.frontend.link.state == ready_state()

    run(scenario())


def test_tokens_of_one_batch_reach_their_streams_in_order(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            calls = [served.stub.Generate(_request()) for _ in range(2)]
            first, second = await served.core.submitted(2)
            handles = [first.handle, second.handle, first.handle, 4_000_000_000]
            batch = core_pb2.TokenBatch(
                handles=b"".join(h.to_bytes(4, "little") for h in handles), token_ids=pack_ints([10, 20, 11, 30])
            )
            batch.ended.add(handle=first.handle).MergeFrom(length())
            batch.ended.add(handle=second.handle).MergeFrom(length())
            served.core.send_batch(batch)
            assert sorted([_joined(await collect(call))[1] for call in calls]) == [[10, 11], [20]]

    run(scenario())
