"""Who counts as one client where clients take turns."""

from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.config import SchedulerConfig
from shared.errors import StartupError
from shared.pb import generation_pb2 as pb
from shared.pb import generation_pb2_grpc
from shared.rpc import make_channel
from tests.frontend.fake_core import length
from tests.frontend.harness import collect, run, serving

SECRET = "Bearer sk-very-secret"


def clients(model: Path, fair_by: str | None, *calls: dict[str, str]) -> list[str]:
    """Of calls with this metadata, each over a connection of its own, the client that the core is told."""
    told: list[str] = []

    async def scenario() -> None:
        async with serving(model, lambda submit: ((), length()), fair_by=fair_by) as served:
            for metadata in calls:
                async with make_channel(f"127.0.0.1:{served.frontend.port}") as channel:
                    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                    await collect(stub.Generate(pb.GenerateRequest(text="a"), metadata=tuple(metadata.items())))
            told.extend(submit.client for submit in served.core.submits)

    run(scenario())
    return told


def test_nobody_is_told_apart_unless_asked_for(model: Path) -> None:
    assert clients(model, None, {}, {"authorization": SECRET}) == ["", ""]


def test_connections_of_one_address_are_one_client(model: Path) -> None:
    one, other = clients(model, "peer", {}, {"authorization": SECRET})
    assert one == other != ""


@pytest.mark.parametrize(("fair_by", "key"), [("token", "authorization"), ("x-tenant", "x-tenant")])
def test_metadata_tells_clients_apart_and_stays_secret(model: Path, fair_by: str, key: str) -> None:
    calls = ({key: SECRET}, {key: SECRET}, {key: "Bearer other"}, {"unrelated": SECRET}, {})
    same, again, other, *without = clients(model, fair_by, *calls)
    assert same == again and len({same, other, ""}) == 3 and without == ["", ""]
    assert "secret" not in same and len(same) == 32


@pytest.mark.parametrize("key", ["", "X-Tenant", "a b"])
def test_a_key_that_no_metadata_can_have_is_refused(key: str) -> None:
    with pytest.raises(StartupError, match=f"--fair-by '{key}': "):
        SchedulerConfig(model=Path("model"), workers=("host:1",), fair_by=key)
