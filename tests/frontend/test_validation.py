"""What Generate refuses, by field and bound, through gRPC; and what it makes of a request that is silent."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from tokenizers import Tokenizer

from scheduler_svc.frontend.seeds import derive_seed
from shared.model_config import load_model_config
from shared.pb import core_pb2
from shared.pb import generation_pb2 as pb
from tests.frontend.fake_core import Answer, ids, length, ready_state, until
from tests.frontend.harness import collect, run, serving
from tests.frontend.model_folder import make_model_folder

CONTEXT, VOCABULARY = 200, 512
_NAN = float("nan")


def _ids(*values: int) -> pb.TokenIds:
    return pb.TokenIds(ids=values)


def _sampling(**fields: Any) -> dict[str, Any]:
    return {"text": "a", "sampling": pb.SamplingParams(**fields)}


def _stopping(**fields: Any) -> dict[str, Any]:
    return {"text": "a", "stopping": pb.StoppingParams(**fields)}


_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt: one of text, token_ids and chat"),
    ({"text": ""}, "text: must not be empty"),
    ({"token_ids": _ids()}, "token_ids: has no tokens"),
    ({"chat": pb.ChatPrompt()}, "chat.messages: at least one"),
    ({"token_ids": _ids(1, -1)}, "token_ids[1]: must be within [0, 512), is -1"),
    ({"token_ids": _ids(VOCABULARY)}, "token_ids[0]: must be within [0, 512), is 512"),
    ({"token_ids": _ids(2**63 - 1)}, "token_ids[0]: must be within [0, 512)"),
    ({"token_ids": _ids(*[1] * CONTEXT)}, "token_ids: has 200 tokens; must be fewer than the context limit, 200"),
    ({"token_ids": _ids(*[1] * (CONTEXT + 1))}, "token_ids: has 201 tokens"),
    ({"text": "b " * 300}, "text: has"),
    ({"text": "a" * 5000}, "text: has 5000 bytes; at most 4096"),
    ({"text": "a", "output_token_ids": _ids(3, 512)}, "output_token_ids[1]: must be within"),
    ({"token_ids": _ids(*[1] * 199), "output_token_ids": _ids(1, 1)}, "output_token_ids: has 2 ids; at most 1"),
    ({"text": "a", "n": 2, "output_token_ids": _ids(3)}, "output_token_ids: requires n = 1"),
    ({"text": "a", "n": 129}, "n: must be within [0, 128], is 129"),
    ({"text": "a", "n": 2, "sample_index": 2**32 - 1}, "sample_index: must be within"),
    ({"text": "a", "request_id": "ä" * 129}, "request_id: has 258 bytes; at most 256"),
    ({"text": "a", "cache_salt": "s" * 257}, "cache_salt: has 257 bytes"),
    (_sampling(temperature=-0.1), "sampling.temperature: must be within [0, 100"),
    (_sampling(temperature=100.5), "sampling.temperature: must be within"),
    (_sampling(temperature=_NAN), "sampling.temperature: must be within"),
    (_sampling(temperature=float("inf")), "sampling.temperature: must be within"),
    (_sampling(top_k=-1), "sampling.top_k: must be within [0,"),
    (_sampling(top_p=0), "sampling.top_p: must be within (0, 1], is 0"),
    (_sampling(top_p=1.5), "sampling.top_p: must be within"),
    (_sampling(top_p=_NAN), "sampling.top_p: must be within"),
    (_sampling(min_p=-0.5), "sampling.min_p: must be within [0, 1]"),
    (_sampling(min_p=_NAN), "sampling.min_p: must be within"),
    (_sampling(presence_penalty=2.1), "sampling.presence_penalty: must be within [-2.0, 2.0]"),
    (_sampling(presence_penalty=_NAN), "sampling.presence_penalty: must be within"),
    (_sampling(frequency_penalty=-2.5), "sampling.frequency_penalty: must be within"),
    (_sampling(repetition_penalty=0), "sampling.repetition_penalty: must be within [0.01, 100.0], is 0"),
    (_sampling(repetition_penalty=-1), "sampling.repetition_penalty: must be within"),
    (_sampling(repetition_penalty=_NAN), "sampling.repetition_penalty: must be within"),
    (_sampling(logit_bias={512: 1}), "sampling.logit_bias[512]: its id must be within [0, 512)"),
    (_sampling(logit_bias={-1: 1}), "sampling.logit_bias[-1]: its id"),
    (_sampling(logit_bias={1 << 60: 1}), f"sampling.logit_bias[{1 << 60}]: its id"),
    (_sampling(logit_bias={3: 100.5}), "sampling.logit_bias[3]: must be within [-100.0, 100.0]"),
    (_sampling(logit_bias={3: _NAN}), "sampling.logit_bias[3]: must be within"),
    (_sampling(logit_bias=dict.fromkeys(range(1025), 1)), "sampling.logit_bias: has 1025 ids; at most 1024"),
    (_sampling(bad_words=["a"] * 65), "sampling.bad_words: has 65 words; at most 64"),
    (_sampling(bad_words=["a", ""]), "sampling.bad_words[1]: must be within [1, 128] bytes, is 0"),
    (_sampling(bad_words=["ä" * 65]), "sampling.bad_words[0]: must be within [1, 128] bytes, is 130"),
    (_sampling(allowed_token_ids=_ids()), "sampling.allowed_token_ids: must not be empty"),
    (_sampling(allowed_token_ids=_ids(3, 512)), "sampling.allowed_token_ids[1]: must be within [0, 512), is 512"),
    (
        {**_sampling(allowed_token_ids=_ids(9)), **_stopping(min_tokens=1, stop_token_ids=[9])},
        "sampling.allowed_token_ids: bad_words and min_tokens leave none",
    ),
    ({"text": "a", "output": pb.OutputParams(logprobs=21)}, "output.logprobs: must be within [0, 20], is 21"),
    ({"text": "a", "output": pb.OutputParams(prompt_logprobs=21)}, "output.prompt_logprobs: must be within [0, 20]"),
    (_stopping(max_tokens=0), "stopping.max_tokens: must be within [1,"),
    (_stopping(max_tokens=3, min_tokens=4), "stopping.min_tokens: must be at most max_tokens, 3, is 4"),
    (_stopping(stop=["x"] * 17), "stopping.stop: has 17 strings; at most 16"),
    (_stopping(stop=["x", ""]), "stopping.stop[1]: must be within [1, 1024] bytes, is 0"),
    (_stopping(stop=["ä" * 513]), "stopping.stop[0]: must be within [1, 1024] bytes, is 1026"),
    (_stopping(stop_token_ids=[1] * 65), "stopping.stop_token_ids: has 65 ids; at most 64"),
    (_stopping(stop_token_ids=[5, -7]), "stopping.stop_token_ids[1]: must be within [0, 512), is -7"),
    (_stopping(stop_token_ids=[512]), "stopping.stop_token_ids[0]: must be within"),
]


def test_every_field_is_checked_and_refused_by_name_and_bound(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, max_prompt_bytes=4096) as served:
            for fields, expected in _REFUSED:
                with pytest.raises(aio.AioRpcError) as refused:
                    await collect(served.stub.Generate(pb.GenerateRequest(**fields)))
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert str(refused.value.details()).startswith(expected), (refused.value.details(), expected)
            assert served.core.submits == []

    run(scenario())


def _submitted(model: Path, *requests: pb.GenerateRequest, **settings: Any) -> list[core_pb2.Submit]:
    """What the core gets for requests that it ends at once."""

    def answer(submit: core_pb2.Submit) -> Answer:
        return (), length()

    submits: list[core_pb2.Submit] = []

    async def scenario() -> None:
        async with serving(model, answer, **settings) as served:
            for request in requests:
                await collect(served.stub.Generate(request))
            submits.extend(served.core.submits)

    run(scenario())
    return submits


def _sampled(submit: core_pb2.Submit) -> tuple[float, int, float, float]:
    sampling = submit.sampling
    return round(sampling.temperature, 6), sampling.top_k, round(sampling.top_p, 6), round(sampling.min_p, 6)


def test_where_a_request_is_silent_the_generation_config_answers(model: Path) -> None:
    own = pb.SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0.25)
    silent, explicit = _submitted(model, pb.GenerateRequest(text="a"), pb.GenerateRequest(text="a", sampling=own))
    assert _sampled(silent) == (0.6, 20, 0.95, 0)
    assert _sampled(explicit) == (0, 0, 1, 0.25)
    assert silent.max_tokens == 0


def test_the_generation_config_can_be_turned_off(model: Path) -> None:
    (silent,) = _submitted(model, pb.GenerateRequest(text="a"), use_generation_config=False)
    assert _sampled(silent) == (1, 0, 1, 0)


def test_the_prompt_may_be_one_shorter_than_the_context_and_max_tokens_is_clamped(model: Path) -> None:
    prompt = _ids(*[1] * (CONTEXT - 1))
    (submit,) = _submitted(model, pb.GenerateRequest(token_ids=prompt, stopping=pb.StoppingParams(max_tokens=50)))
    assert (len(ids(submit.prompt)), submit.max_tokens) == (CONTEXT - 1, 1)


def test_stop_tokens_are_those_of_the_request_and_the_model_unless_ignored(model: Path) -> None:
    own = pb.StoppingParams(stop_token_ids=[9, 3, 9])
    ignoring = pb.StoppingParams(stop_token_ids=[9], ignore_eos=True)
    first, second = _submitted(
        model, pb.GenerateRequest(text="a", stopping=own), pb.GenerateRequest(text="a", stopping=ignoring)
    )
    assert ids(first.stop_token_ids) == [3, 9, 398, 400]
    assert ids(second.stop_token_ids) == [9]


def test_top_k_of_the_whole_vocabulary_or_more_keeps_all(model: Path) -> None:
    (submit,) = _submitted(model, pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_k=VOCABULARY)))
    assert submit.sampling.top_k == 0


def test_n_samples_share_the_prompt_and_have_seeds_of_their_own(model: Path, tokenizer: Tokenizer) -> None:
    seed = pb.SamplingParams(seed=99)
    three = pb.GenerateRequest(text="The fox", request_id="r", n=3, sampling=seed, cache_salt="s", priority=-4)
    third_alone = pb.GenerateRequest(text="The fox", n=1, sample_index=2, sampling=seed)
    *submits, alone = _submitted(model, three, third_alone)
    prompt = tokenizer.encode("The fox").ids
    assert [ids(submit.prompt) for submit in submits] == [prompt] * 3
    assert [submit.sampling.seed for submit in submits] == [derive_seed(99, i) for i in range(3)]
    assert [submit.sample_index for submit in submits] == [0, 1, 2]
    assert {(s.request_id, s.cache_salt, s.priority) for s in submits} == {("r", "s", -4)}
    assert (alone.sampling.seed, alone.sample_index) == (derive_seed(99, 2), 2)


def test_limits_follow_the_core_s_state(model: Path) -> None:
    """Another pool, another context limit."""

    async def scenario() -> None:
        async with serving(model, lambda submit: ((), length())) as served:
            changed = core_pb2.ServedModel(context_limit=5, vocabulary_size=10)
            served.core.tell(ready_state(model=changed))
            await until(lambda: served.frontend.link.state == served.core.state)
            for refused in (_ids(1, 2, 3, 4, 5), _ids(10)):
                with pytest.raises(aio.AioRpcError):
                    await collect(served.stub.Generate(pb.GenerateRequest(token_ids=refused)))
            await collect(served.stub.Generate(pb.GenerateRequest(token_ids=_ids(1, 2, 3, 4))))

    run(scenario())


def test_end_of_sequence_tokens_are_the_union_of_all_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """generation_config.json has two, config.json one of them, the tokenizer a third."""
    folder = make_model_folder(tmp_path, eos_token="<|im_start|>")
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    assert load_model_config(folder).eos_token_ids == tuple(sorted(tokenizer.get_vocab()[name] for name in names))
