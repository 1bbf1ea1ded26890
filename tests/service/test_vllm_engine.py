"""VllmEngine through the running services: the same tokens as GenerationService, whatever dies, and true KV events."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from grpc import aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from tokenizers import Tokenizer

from shared.pb import generation_pb2 as pb
from tandem.models import model_folder
from tests.patience import PATIENCE_S
from tests.service.tandem_process import Tandem, generate, running

BLOCK_SIZE = 64
TOKENIZER = Tokenizer.from_file(str(model_folder("tiny") / "tokenizer.json"))
PROMPT: list[int] = TOKENIZER.encode("It is a truth universally " * 24).ids


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tandem]:
    log = tmp_path_factory.mktemp("vllm-engine") / "log"
    with running(log, "--dtype", "float64", "--workers", "2", "--kv-cache-memory", "64") as service:
        yield service


def request(prompt: list[int], max_tokens: int, **more: Any) -> vllm.GenerateRequest:
    params = vllm.SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=max_tokens, ignore_eos=True)
    return vllm.GenerateRequest(tokenized={"input_ids": prompt}, sampling_params=params, **more)


class Follower:
    """Which blocks the engine has, as its events tell."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.sequence_number = 0

    async def follow(self, stub: Any) -> None:
        """Until cancelled."""
        async for batch in stub.SubscribeKvEvents(common.SubscribeKvEventsRequest()):
            assert batch.sequence_number == self.sequence_number + 1
            self.sequence_number = batch.sequence_number
            for event in batch.events:
                self._apply(event)

    def _apply(self, event: common.KvCacheEvent) -> None:
        if event.HasField("cleared"):
            self.blocks.clear()
        for block in event.removed.block_hashes:
            del self.blocks[block]
        parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
        for block in event.stored.blocks:
            assert block.block_size == BLOCK_SIZE and (parent is None or parent in self.blocks)
            self.blocks[block.block_hash] = (parent, list(block.token_ids))
            parent = block.block_hash

    def cached_tokens(self, prompt: list[int]) -> int:
        """Tokens of the prompt that a request should find: whole blocks, and never all of them."""
        parent, length = None, 0
        while length + BLOCK_SIZE < len(prompt):
            wanted = (parent, prompt[length : length + BLOCK_SIZE])
            found = [block for block, held in self.blocks.items() if held == wanted]
            if not found:
                break
            (parent,), length = found, length + BLOCK_SIZE
        return length


@contextlib.asynccontextmanager
async def followed(endpoint: str):
    async with aio.insecure_channel(endpoint) as channel:
        stub, follower = vllm_engine_pb2_grpc.VllmEngineStub(channel), Follower()
        following = asyncio.create_task(follower.follow(stub))
        try:
            yield stub, follower
            assert not following.done(), following.exception()
        finally:
            following.cancel()


async def complete(stub: Any, prompt: list[int], max_tokens: int) -> vllm.GenerateComplete:
    (answer,) = [answer async for answer in stub.Generate(request(prompt, max_tokens))]
    return answer.complete


async def known(follower: Follower, prompt: list[int], tokens: int) -> None:
    """Waits until the events tell that so many tokens of the prompt are cached."""
    async with asyncio.timeout(PATIENCE_S):
        while follower.cached_tokens(prompt) != tokens:
            await asyncio.sleep(0.02)


def test_events_tell_what_the_next_request_finds(service: Tandem) -> None:
    async def scenario() -> None:
        async with followed(service.endpoint) as (stub, follower):
            first = await complete(stub, PROMPT, 70)
            both = [*PROMPT, *first.output_ids]
            assert first.cached_tokens == 0 and len(both) >= 4 * BLOCK_SIZE
            # The K/V of the last token is never computed.
            await known(follower, both, (len(both) - 1) // BLOCK_SIZE * BLOCK_SIZE)
            again = await complete(stub, both, 1)
            assert again.cached_tokens == follower.cached_tokens(both) > len(PROMPT)
            assert (await stub.FlushCache(common.FlushCacheRequest(timeout_s=5))).success
            await known(follower, both, 0)
            assert not follower.blocks
            assert (await complete(stub, both, 1)).cached_tokens == 0

    asyncio.run(scenario())


def test_a_stream_survives_its_worker_and_its_core_and_so_do_the_events(service: Tandem) -> None:
    wanted = pb.GenerateRequest(token_ids={"ids": PROMPT}, cache_salt="undisturbed")
    wanted.sampling.temperature, wanted.sampling.top_k, wanted.sampling.seed = 0.8, 20, 3
    wanted.sampling.top_p, wanted.sampling.min_p = 1.0, 0.0
    wanted.stopping.max_tokens, wanted.stopping.ignore_eos = 150, True

    async def scenario() -> None:
        async with aio.insecure_channel(service.endpoint) as channel:
            (undisturbed,) = await generate(channel, wanted)
        async with followed(service.endpoint) as (stub, follower):
            received: list[int] = []
            kills = {20: "rank", 70: "core"}
            async for answer in stub.Generate(request(PROMPT, 150, stream=True)):
                received += answer.chunk.token_ids
                for at in [at for at in kills if at <= len(received)]:
                    for process in service.processes(kills.pop(at)):
                        process.kill()
            assert received == undisturbed.token_ids and not kills
            both = [*PROMPT, *received]
            await known(follower, both, (len(both) - 1) // BLOCK_SIZE * BLOCK_SIZE)
            assert (await complete(stub, both, 1)).cached_tokens == follower.cached_tokens(both)

    asyncio.run(scenario())
