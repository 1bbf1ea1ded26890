"""The trained mixture-of-experts model through `tandem serve`, on one rank and on two, undisturbed and killed."""

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from shared.pb import generation_pb2 as pb
from tandem import tiny
from tests.service.losses import disturbed, kill
from tests.service.tandem_process import generate_all, running, until_idle

PROMPT = "It is a truth universally acknowledged"


def requests() -> list[pb.GenerateRequest]:
    """A greedy one and sampled ones."""
    made = []
    for seed, temperature in enumerate((0.0, 0.8, 1.0)):
        request = pb.GenerateRequest(text=PROMPT)
        request.sampling.temperature, request.sampling.seed = temperature, seed
        request.stopping.max_tokens, request.stopping.ignore_eos = 80, True
        made.append(request)
    return made


@pytest.mark.parametrize("arguments", [[], ["--tensor-parallel", "2", "--expert-parallel"]], ids=["one", "two"])
def test_a_worker_of_experts_may_die(tmp_path: Path, arguments: list[str]) -> None:
    from tests.worker.model_folder import reference_greedy  # with transformers, which takes seconds

    common = ["--model", "tiny-moe", "--dtype", "float64", "--kv-cache-memory", "64"]
    with running(tmp_path / "log", *common, *arguments) as service:
        undisturbed = asyncio.run(generate_all(service.endpoint, requests()))
        killed = asyncio.run(disturbed(service, requests(), kill(service, "launcher")))
        asyncio.run(until_idle(service.endpoint))
    assert [output.token_ids for output in killed] == [output.token_ids for output in undisturbed]
    assert [output.text for output in killed] == [output.text for output in undisturbed]
    assert undisturbed[0].text.startswith(", that a single man in possession of a good fortune")
    prompt = Tokenizer.from_file(str(tiny.MOE / "tokenizer.json")).encode(PROMPT).ids
    assert undisturbed[0].token_ids[:12] == reference_greedy(tiny.MOE, prompt, 12)
