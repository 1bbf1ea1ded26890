"""What fuzzing has found, each value as it came: what it did is beside it."""

import json
from pathlib import Path

import numpy as np
import pytest

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.fitting import foreign
from shared.pb import core_pb2, peer_pb2, worker_pb2
from shared.pb import generation_pb2 as pb
from shared.wire import description_from_pb, pack
from tests.fuzz.edges import edge
from tests.fuzz.samples import DESCRIPTION


def tokens(**lists: list[int]) -> list[bytes]:
    """A batch of the core's."""
    values = {name: pack(np.array(numbers, dtype=np.int32)) for name, numbers in lists.items()}
    return [core_pb2.CoreMessage(tokens=core_pb2.TokenBatch(**values)).SerializeToString()]


def submit(**sampling: float) -> list[bytes]:
    """A frontend's message."""
    message = core_pb2.Submit(handle=1, request_id="a", prompt=pack(np.array([1], dtype=np.int32)), max_tokens=2)
    message.sampling.top_p = 1.0
    for name, value in sampling.items():
        setattr(message.sampling, name, value)
    return [core_pb2.FrontendMessage(submit=message).SerializeToString()]


def led_before(term: int) -> list[bytes]:
    """A frontend's message."""
    return [core_pb2.FrontendMessage(led_before=core_pb2.LedBefore(term=term)).SerializeToString()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        # Ended the frontend, with every stream that it had.
        ("core messages at a frontend", [b"\0"]),
        ("core messages at a frontend", tokens(handles=[1], token_ids=[])),
        ("core messages at a frontend", tokens(handles=[1], token_ids=[-1])),
        ("core messages at a frontend", tokens(handles=[2], token_ids=[300], logprob_sizes=[9])),
        # The worker refused the plan, and everybody there was computed again.
        ("frontend messages at the core", submit(temperature=float("nan"))),
        ("frontend messages at the core", submit(top_p=0.0)),
        ("frontend messages at the core", submit(logprobs=1 << 20)),
        # Ended the core of whoever heard it: the next term has no room in a message.
        ("peers at a scheduler", [peer_pb2.PeerState(scheduler=9, term=(1 << 64) - 1).SerializeToString()]),
        ("frontend messages at the core", led_before((1 << 64) - 1)),
        # Ended what takes the metrics of that process, with a word of a bug.
        ("metrics", b"null"),
        ("metrics", json.dumps([("a", "counter", "", [(("a", []), "x")])]).encode()),
        # Was a ValueError of the client library.
        ("errors at a client", (8, "full", "soon")),
        # Was an AssertionError and a KeyError of the client library.
        ("responses at a client", [b""]),
        ("responses at a client", [pb.GenerateResponse(index=7).SerializeToString()]),
    ],
)
def test_it_is_taken_or_refused(name: str, value: object) -> None:
    edge(name).take(value)


@pytest.mark.parametrize(
    "absurd",
    [
        {"num_blocks": (1 << 32) - 1},  # took all the memory that there was
        {"block_size": 0},
        {"max_num_seqs": 1 << 16, "max_model_length": 1 << 20},
        {"eos_token_ids": [1 << 20]},  # refused every request by a field that nobody had sent
    ],
)
def test_a_worker_that_tells_absurd_sizes_is_refused(absurd: dict[str, object]) -> None:
    description = worker_pb2.DescribeResponse(**absurd)
    message = worker_pb2.DescribeResponse()
    message.CopyFrom(DESCRIPTION)
    for name in absurd:
        message.ClearField(name)
    message.MergeFrom(description)
    assert next(iter(absurd)) in foreign(description_from_pb(message), SchedulerConfig(Path(), ("a:1",)), "f")
