"""VllmEngine before a scripted core: what a gateway sends and gets, field by field."""

import asyncio
import hashlib
import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from tokenizers import Tokenizer

from scheduler_svc.frontend.vllm_engine.requests import to_generate_request
from shared.pb import core_pb2
from tests.frontend.fake_core import Answer, ids, length, ready_state, stopped, until
from tests.frontend.harness import Served, collect, rest, run, serving

PROMPT = [10, 11, 12]


def stub(served: Served) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(served.channel)


def request(stream: bool = False, **params: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(
        request_id="a", tokenized={"input_ids": PROMPT}, stream=stream, sampling_params=vllm.SamplingParams(**params)
    )


def three_tokens(submit: core_pb2.Submit) -> Answer:
    return [20, 21, 22], length()


def test_a_stream_carries_deltas_and_one_last_message(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = stub(served).Generate(request(stream=True))
            (submit,) = await served.core.submitted()
            served.core.give(submit, [20], cached_tokens=2)
            first = await call.read()
            served.core.give(submit, [21, 22], length())
            messages = [first, *await rest(call)]
            chunks = [message.chunk for message in messages if message.HasField("chunk")]
            assert [token for chunk in chunks for token in chunk.token_ids] == [20, 21, 22]
            assert [chunk.prompt_tokens for chunk in chunks] == [3] * len(chunks)
            assert first.chunk.completion_tokens == 1 and sum(chunk.completion_tokens for chunk in chunks) == 3
            last = messages[-1].complete
            assert (last.finish_reason, list(last.output_ids)) == ("length", [20, 21, 22])
            assert (last.prompt_tokens, last.completion_tokens, last.cached_tokens) == (3, 3, 2)
            assert len(messages) == len(chunks) + 1

    run(scenario())


def test_without_a_stream_each_sample_has_one_message_in_order(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = asyncio.create_task(collect(stub(served).Generate(request(n=2))))
            first, second = await served.core.submitted(2)
            served.core.give(second, [30], length())
            await asyncio.sleep(0.05)
            served.core.give(first, [20], length())
            answers = [answer.complete for answer in await call]
            assert [(answer.index, list(answer.output_ids)) for answer in answers] == [(0, [20]), (1, [30])]

    run(scenario())


def test_what_stopped_a_sample_is_told_if_the_request_named_it(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            for params, tokens, end, told in (
                ({"stop_token_ids": [30]}, [20, 30], stopped(30), ("matched_token_id", 30)),
                ({}, [20, 398], stopped(398), (None, None)),
                ({"stop": ["lazy"]}, tokenizer.encode("the lazy dog").ids, None, ("matched_stop_str", "lazy")),
            ):
                before = len(served.core.submits)
                call = asyncio.create_task(collect(stub(served).Generate(request(**params))))
                await served.core.submitted(before + 1)
                served.core.give(served.core.submits[-1], tokens, end)
                (answer,) = await call
                kind = answer.complete.WhichOneof("matched_stop")
                assert answer.complete.finish_reason == "stop" and kind == told[0]
                assert kind is None or getattr(answer.complete, kind) == told[1]

    run(scenario())


def test_what_is_unset_is_neutral_and_what_is_set_arrives(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, three_tokens) as served:
            await collect(stub(served).Generate(request()))
            everything = {
                **{"temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "logit_bias": {5: 2.0}},
                **{"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5},
                **{"max_tokens": 9, "min_tokens": 2, "stop_token_ids": [40], "ignore_eos": True, "seed": -1},
                **{"skip_special_tokens": True, "spaces_between_special_tokens": True},
                **{"include_stop_str_in_output": True, "grammar_from_first_token": True},
            }
            await collect(stub(served).Generate(request(**everything)))
            plain, given = served.core.submits
            sampling = plain.sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1, 0, 1, 0)
            assert (plain.max_tokens, plain.min_tokens, ids(plain.stop_token_ids)) == (0, 0, [398, 400])
            sampling = given.sampling
            assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.75, 0.25)
            rules = sampling.rules
            assert (rules.frequency_penalty, rules.presence_penalty, rules.repetition_penalty) == (0.5, -0.5, 1.5)
            assert ids(rules.bias_ids) == [5] and rules.bias_values == struct.pack("<f", 2)
            assert not plain.sampling.HasField("rules") and not plain.sampling.HasField("logprobs")
            assert (given.max_tokens, given.min_tokens, ids(given.stop_token_ids)) == (9, 2, [40])
            again = request(**everything)
            await collect(stub(served).Generate(again))
            assert served.core.submits[-1].sampling.seed == sampling.seed
            assert plain.request_id == "a" and ids(plain.prompt) == PROMPT

    run(scenario())


def entry(logprob: float, *top: tuple[int, float]) -> bytes:
    """As a worker packs it."""
    return struct.pack("<fi", logprob, 1) + b"".join(struct.pack("<if", *item) for item in top)


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_come_with_their_tokens_and_those_of_the_prompt_once(model: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = stub(served).Generate(request(stream=stream, logprobs=1, prompt_logprobs=2))
            (submit,) = await served.core.submitted()
            told = core_pb2.TokenBatch(started=[core_pb2.Started(handle=submit.handle)])
            entries = entry(-1.5, (7, -0.5), (8, -0.75)) + entry(-2.5, (9, -0.25), (7, -4.0))
            told.prompt_logprobs.add(handle=submit.handle, entries=entries)
            served.core.send_batch(told)
            for token in (20, 21):
                one = entry(-token / 4, (30 + token, -0.5))
                handles, token_ids = struct.pack("<I", submit.handle), struct.pack("<i", token)
                batch = core_pb2.TokenBatch(handles=handles, token_ids=token_ids, logprobs=one)
                batch.logprob_sizes = struct.pack("<i", len(one))
                served.core.send_batch(batch)
            served.core.give(submit, [], length())
            messages = await collect(call)
            parts = [m.chunk if m.HasField("chunk") else m.complete for m in messages]
            output = [part.output_logprobs for part in parts]
            assert [token for part in output for token in part.token_ids] == [20, 21]
            assert [value for part in output for value in part.token_logprobs] == [-5.0, -5.25]
            tops = [top for part in output for top in part.top_logprobs]
            assert [(list(top.token_ids), list(top.values)) for top in tops] == [([50], [-0.5]), ([51], [-0.5])]
            (given,) = [part.input_logprobs for part in parts if part.HasField("input_logprobs")]
            assert parts[0].HasField("input_logprobs") and list(given.token_ids) == PROMPT
            values = [value.value if value.HasField("value") else None for value in given.token_logprobs]
            assert values == [None, -1.5, -2.5] and list(given.top_logprobs[2].token_ids) == [9, 7]

    run(scenario())


UNKNOWN = [
    ("truncate_prompt_tokens", request(truncate_prompt_tokens=5)),
    ("kv_transfer_params_json", vllm.GenerateRequest(kv_transfer_params_json="{}")),
    ("kv_transfer_params", vllm.GenerateRequest(kv_transfer_params=vllm.KvTransferParams())),
    ("data_parallel_rank", vllm.GenerateRequest(data_parallel_rank=0)),
    ("mm_inputs", vllm.GenerateRequest(mm_inputs=vllm.MultimodalInputs())),
    ("extra_mm_inputs", vllm.GenerateRequest(extra_mm_inputs=[vllm.MultimodalInputs()])),
    ("media_refs", vllm.GenerateRequest(media_refs=vllm.MediaRefs())),
]


@pytest.mark.parametrize(("field", "wanted"), UNKNOWN, ids=[field for field, _ in UNKNOWN])
def test_what_cannot_be_honoured_is_refused_by_name(model: Path, field: str, wanted: vllm.GenerateRequest) -> None:
    async def scenario() -> None:
        async with serving(model, three_tokens) as served:
            with pytest.raises(aio.AioRpcError) as caught:
                await collect(stub(served).Generate(wanted))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in (caught.value.details() or "") and not served.core.submits

    run(scenario())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("json_schema", '{"type": "object"}'),
        ("json_object", True),
        ("regex", "a+"),
        ("grammar", "start: /a+/"),
        ("structural_tag", '{"structures": [], "triggers": []}'),
        ("choice", vllm.ChoiceConstraint(choices=["a", "b"])),
    ],
)
def test_constraints_keep_their_kind(field: str, value: Any) -> None:
    constraint = to_generate_request(request(**{field: value})).constraint
    assert constraint.WhichOneof("language") == field
    converted = getattr(constraint, field)
    assert list(converted.choices) == list(value.choices) if field == "choice" else converted == value
    assert not constraint.enable_in_reasoning
    at_once = to_generate_request(request(grammar_from_first_token=True, **{field: value})).constraint
    assert at_once.enable_in_reasoning and at_once.WhichOneof("language") == field


def test_a_constraint_holds(model: Path, tokenizer: Tokenizer) -> None:
    allowed = tokenizer.encode("b").ids[0]

    async def scenario() -> None:
        async with serving(model) as served:
            call = asyncio.create_task(collect(stub(served).Generate(request(regex="b"))))
            (submit,) = await served.core.submitted()
            await until(lambda: bool(served.core.masks))
            mask = served.core.masks[0]
            assert submit.constrained and mask.handle == submit.handle
            assert [v for v in range(512) if mask.allowed[v // 8] >> v % 8 & 1] == [allowed]
            served.core.give(submit, [allowed], length())
            await call

    run(scenario())


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 1.5}),
        ("stop_token_ids[0]", {"stop_token_ids": [4_000_000_000]}),
        ("n", {"n": 129}),
        ("frequency_penalty", {"frequency_penalty": 2.5}),
        ("presence_penalty", {"presence_penalty": -2.5}),
        ("repetition_penalty", {"repetition_penalty": 101}),
        ("logit_bias[-1]", {"logit_bias": {-1: 1.0}}),
        ("logprobs", {"logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("constraint.regex", {"regex": "(b"}),
        ("constraint.json_schema", {"json_schema": '{"type": 1}'}),
        ("ignore_eos", {"ignore_eos": True, "json_object": True}),
    ],
)
def test_values_are_checked_as_tandems_own(model: Path, field: str, params: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with serving(model, three_tokens) as served:
            with pytest.raises(aio.AioRpcError) as caught:
                await collect(stub(served).Generate(request(**params)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in (caught.value.details() or "")

    run(scenario())


def test_an_abort_ends_live_requests_and_passes_over_others(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = stub(served).Generate(request(stream=True))
            await served.core.submitted()
            await stub(served).Abort(vllm.AbortRequest(request_ids=["nobody", "a"]))
            with pytest.raises(aio.AioRpcError) as caught:
                await collect(call)
            assert caught.value.code() is grpc.StatusCode.CANCELLED
            assert sorted(served.core.aborted) == ["a", "nobody"]

    run(scenario())


def test_health_is_whether_requests_are_served(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            engine = stub(served)
            assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
            for change in ({"active": False}, {"progressing": False}):
                served.core.tell(ready_state(**change))
                await until(lambda change=change: served.frontend.link.state == ready_state(**change))
                answer = await engine.HealthCheck(vllm.HealthCheckRequest())
                assert not answer.healthy and answer.message
            served.core.tell(ready_state())

    run(scenario())


def test_what_a_gateway_learns_about_model_server_and_load(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, model_name="small") as served:
            served.core.tell(ready_state(queued=3, running=2))
            await until(lambda: served.frontend.link.state == ready_state(queued=3, running=2))
            engine = stub(served)
            info = await engine.GetModelInfo(vllm.GetModelInfoRequest())
            assert (info.served_model_name, info.model_type, info.is_generation) == ("small", "qwen3", True)
            assert (info.max_context_length, info.vocab_size, list(info.eos_token_ids)) == (200, 512, [398, 400])
            assert Path(info.tokenizer_path) == Path(info.model_path) == model.resolve()
            defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0}
            assert json.loads(info.default_sampling_params_json) == defaults
            server = await engine.GetServerInfo(vllm.GetServerInfoRequest())
            assert (server.active_requests, server.block_size, server.max_num_seqs) == (5, 2, 8)
            thoughts = server.engine_reasoning_parser, server.constrained_decoding_start
            assert thoughts == ("qwen3", "after_reasoning"), "its tokenizer has the marks"
            (load,) = (await engine.GetLoads(vllm.GetLoadsRequest())).loads
            assert (load.num_running_reqs, load.num_waiting_reqs, load.max_running_requests) == (2, 3, 8)
            assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (8, 128, 4 / 64)

    run(scenario())


def test_the_tokenizer_arrives_whole(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            chunks = await collect(stub(served).GetTokenizer(common.GetTokenizerRequest()))
            archive = b"".join(chunk.data for chunk in chunks)
            assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
            assert not any(chunk.sha256 for chunk in chunks[:-1])
            with zipfile.ZipFile(io.BytesIO(archive)) as files:
                received = Tokenizer.from_buffer(files.read("tokenizer.json"))
                assert json.loads(files.read("tokenizer_config.json"))["chat_template"]
            assert received.encode("The quick brown fox").ids == tokenizer.encode("The quick brown fox").ids

    run(scenario())


def cached(block: int, parent: int | None, tokens: tuple[int, int]) -> core_pb2.CacheChange:
    change = core_pb2.CacheChange(block=block, token_ids=struct.pack("<2i", *tokens))
    if parent is not None:
        change.parent = parent
    return change


def test_events_tell_what_is_cached_and_what_changes(model: Path) -> None:
    top = (1 << 64) - 1  # -1 to whoever reads 64 bits as signed

    async def scenario() -> None:
        async with serving(model) as served:
            call = stub(served).SubscribeKvEvents(common.SubscribeKvEventsRequest())
            await call.initial_metadata()
            (cleared,) = (await call.read()).events
            assert cleared.HasField("cleared")
            await until(lambda: served.core.watched == [True])
            chain = [cached(7, None, (1, 2)), cached(top, 7, (3, 4)), cached(9, 7, (5, 6))]
            served.core.tell_cache(core_pb2.CacheNews(group=0, cleared=True, changes=chain))
            batch = await call.read()
            first, second = (event.stored for event in batch.events)
            assert batch.sequence_number == 2
            assert not first.HasField("parent_block_hash") and second.parent_block_hash == 7
            assert [(b.block_hash, list(b.token_ids), b.block_size) for b in first.blocks] == [
                (7, [1, 2], 2),
                (-1, [3, 4], 2),
            ]
            assert [(b.block_hash, list(b.token_ids)) for b in second.blocks] == [(9, [5, 6])]
            gone = [core_pb2.CacheChange(block=block) for block in (9, top)]
            served.core.tell_cache(core_pb2.CacheNews(changes=[*gone, cached(8, 7, (9, 9))]))
            removed, stored = (await call.read()).events
            assert list(removed.removed.block_hashes) == [9, -1] and stored.stored.parent_block_hash == 7
            call.cancel()
            await until(lambda: served.core.watched == [True, False])

    run(scenario())


def test_a_late_subscriber_and_one_whose_core_died_are_told_everything(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            early = stub(served).SubscribeKvEvents(common.SubscribeKvEventsRequest())
            await early.read()
            served.core.tell_cache(core_pb2.CacheNews(changes=[cached(7, None, (1, 2))]))
            await early.read()
            late = stub(served).SubscribeKvEvents(common.SubscribeKvEventsRequest())
            cleared, stored = (await late.read()).events
            assert cleared.HasField("cleared") and stored.stored.blocks[0].block_hash == 7
            served.core.die()
            for call in (early, late):
                (cleared,) = (await call.read()).events
                assert cleared.HasField("cleared")
            await served.core.start()
            await until(lambda: served.core.watched == [True, True])
            served.core.tell_cache(core_pb2.CacheNews(cleared=True, changes=[cached(5, None, (1, 2))]))
            for call in (early, late):
                (stored,) = (await call.read()).events
                assert stored.stored.blocks[0].block_hash == 5
                call.cancel()
            await until(lambda: served.core.watched == [True, True, False])

    run(scenario())


def test_a_subscriber_that_wants_the_past_starts_over(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            with pytest.raises(aio.AioRpcError) as caught:
                await collect(stub(served).SubscribeKvEvents(common.SubscribeKvEventsRequest(start_sequence_number=4)))
            assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE and not served.core.watched

    run(scenario())


def test_a_flush_waits_for_live_requests_as_long_as_it_may(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            engine = stub(served)
            served.core.refused_flushes = 1
            refused = await engine.FlushCache(common.FlushCacheRequest())
            assert not refused.success and refused.message
            served.core.refused_flushes = 2
            assert (await engine.FlushCache(common.FlushCacheRequest(timeout_s=20))).success
            with pytest.raises(aio.AioRpcError) as caught:
                await engine.FlushCache(common.FlushCacheRequest(timeout_s=-1))
            assert "timeout_s" in (caught.value.details() or "")

    run(scenario())
