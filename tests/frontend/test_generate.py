"""Generate through gRPC: what a client gets for what the core gives."""

from pathlib import Path

from tokenizers import Tokenizer

from shared.pb import generation_pb2 as pb
from tests.frontend.fake_core import ids, length
from tests.frontend.harness import rest, run, serving


def _request(text: str = "The quick", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]


def _joined(responses: list[pb.GenerateResponse]) -> tuple[str, list[int]]:
    return "".join(r.text for r in responses), [i for r in responses for i in r.token_ids]


def test_a_stream_is_the_core_s_tokens_and_their_text(model: Path, tokenizer: Tokenizer) -> None:
    output = tokenizer.encode("brown fox 🙂 日本語").ids

    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(_request(request_id="r1", sampling=pb.SamplingParams(seed=7)))
            (submit,) = await served.core.submitted()
            assert ids(submit.prompt) == tokenizer.encode("The quick").ids
            assert submit.request_id == "r1"
            served.core.give(submit, output[:1], cached_tokens=64)
            first = await call.read()
            assert (first.request_id, first.seed) == ("r1", 7)
            for token in output[1:]:
                served.core.give(submit, [token])
            served.core.give(submit, [], length())
            responses = [first, *await rest(call)]
            assert _joined(responses) == ("brown fox 🙂 日本語", output)
            assert "�" not in "".join(r.text for r in responses)
            last = responses[-1]
            assert last.finish.reason == pb.FINISH_REASON_LENGTH
            assert last.usage == pb.Usage(
                prompt_tokens=len(tokenizer.encode("The quick").ids), completion_tokens=len(output), cached_tokens=64
            )
            assert not any(r.request_id or r.seed for r in responses[1:])

    run(scenario())
