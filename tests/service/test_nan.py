"""Logits without a finite maximum end the request that they belong to, and no other (tgi#2593)."""

import asyncio
import json
import shutil
from pathlib import Path

import grpc
import pytest
import torch
from grpc import aio
from safetensors.torch import load_file, save_file

from shared.pb import generation_pb2 as pb
from tandem.models import model_folder
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Output, follow, generate_all, running, until_idle

POISON = 1000


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """The tiny model with one token whose embedding is NaN; its LM head is its own, and sound."""
    folder = Path(shutil.copytree(model_folder("tiny"), tmp_path / "poisoned"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    return folder


def request(ids: list[int], max_tokens: int = 40) -> pb.GenerateRequest:
    made = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    made.sampling.temperature = 0.0
    made.stopping.max_tokens = max_tokens
    made.stopping.ignore_eos = True
    return made


def test_one_request_fails_and_its_neighbours_do_not_notice(poisoned: Path, tmp_path: Path) -> None:
    """Even those that share its first blocks, and those that get its blocks afterwards."""
    shared = list(range(100, 230))
    healthy = [request([*shared, 300 + number]) for number in range(4)]
    arguments = ["--model", str(poisoned), "--dtype", "float64", "--num-kv-blocks", "24"]
    with running(tmp_path / "log", *arguments) as service:
        expected = asyncio.run(generate_all(service.endpoint, healthy))

        async def scenario() -> list[object]:
            outputs = [Output() for _ in range(8)]
            wanted = [*healthy, *(request([*shared, POISON, number]) for number in range(4))]
            async with aio.insecure_channel(service.endpoint) as channel:
                streams = (follow(channel, *pair) for pair in zip(wanted, outputs, strict=True))
                ends = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), PATIENCE_S)
            assert [output.token_ids for output in outputs[:4]] == [output.token_ids for output in expected]
            return ends[4:]

        for end in asyncio.run(scenario()):
            assert isinstance(end, aio.AioRpcError) and end.code() is grpc.StatusCode.INTERNAL
        again = asyncio.run(generate_all(service.endpoint, healthy))
        assert [output.token_ids for output in again] == [output.token_ids for output in expected]
        asyncio.run(until_idle(service.endpoint))
