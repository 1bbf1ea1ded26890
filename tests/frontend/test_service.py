"""The service around Generate: other calls, health, reflection, pings, drain, and the process itself."""

import asyncio
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer

from scheduler_svc.frontend.config import FrontendConfig
from scheduler_svc.frontend.main import Frontend
from shared.errors import StartupError
from shared.pb import core_pb2, generation_pb2_grpc
from shared.pb import generation_pb2 as pb
from shared.ports import unix_endpoint
from shared.rpc import CHANNEL_OPTIONS, make_channel, until_serving
from shared.settings import to_json
from tests.frontend.fake_core import FakeCore, length, ready_state, until
from tests.frontend.harness import Served, collect, rest, run, serving
from tests.frontend.model_folder import make_model_folder

_SERVICES = ("tandem.v1.GenerationService", "vllm.grpc.engine.VllmEngine")
_ALL = ("", "readiness", "tandem.Active", *_SERVICES, "liveness")


def test_tokenize_and_detokenize_are_the_tokenizer_s(model: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            text = "The <|im_end|> fox 🙂"
            token_ids = tokenizer.encode(text).ids
            answer = await served.stub.Tokenize(pb.TokenizeRequest(text=text))
            assert list(answer.token_ids) == token_ids
            chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])
            answer = await served.stub.Tokenize(pb.TokenizeRequest(chat=chat))
            rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            assert list(answer.token_ids) == tokenizer.encode(rendered).ids
            shown = await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=token_ids))
            assert shown.text == "The  fox 🙂"
            request = pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=False)
            assert (await served.stub.Detokenize(request)).text == text
            for bad in (-1, 512, 2**40):
                with pytest.raises(aio.AioRpcError, match=r"token_ids\[0\]: must be within \[0, 512\)"):
                    await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[bad]))
            with pytest.raises(aio.AioRpcError, match="prompt: one of"):
                await served.stub.Tokenize(pb.TokenizeRequest())

    run(scenario())


@pytest.mark.parametrize("method", ["Tokenize", "Generate"])
def test_a_request_that_can_t_be_decoded_is_the_caller_s_mistake(model: Path, method: str) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = served.channel.unary_unary(f"/tandem.v1.GenerationService/{method}")
            with pytest.raises(aio.AioRpcError, match="request: can't be decoded") as refused:
                await call(b"\xff")
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(scenario())


def test_model_info_and_load_tell_what_the_core_says(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, model_name="fox") as served:
            info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
            assert (info.model_name, info.architecture, info.dtype) == ("fox", "Qwen3ForCausalLM", "float32")
            assert (info.vocabulary_size, info.max_context_length) == (512, 200)
            assert (list(info.eos_token_ids), len(info.fingerprint)) == ([398, 400], 16)
            served.core.tell(ready_state(queued=3, running=2))
            await until(lambda: served.frontend.link.state == served.core.state)
            load = await served.stub.GetLoad(pb.GetLoadRequest())
            worker = pb.WorkerLoad(endpoint="worker:1", connected=True, total_blocks=64, free_blocks=60)
            assert load == pb.GetLoadResponse(queued=3, running=2, max_running=8, workers=[worker])

    run(scenario())


async def _serving(served: Served) -> set[str]:
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    statuses = {name: (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in _ALL}
    return {name for name, status in statuses.items() if status == health_pb2.HealthCheckResponse.SERVING}


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (ready_state(), set(_ALL)),
        (ready_state(active=False), {"", "readiness", "liveness"}),
        (core_pb2.CoreState(standby=True), {"", "readiness", "liveness"}),
        (ready_state(progressing=False), {"tandem.Active", *_SERVICES, "liveness"}),
        (core_pb2.CoreState(progressing=True), {"liveness"}),
    ],
    ids=["active", "without workers", "standby", "stuck", "without a model"],
)
def test_health_follows_the_core_s_state(state: core_pb2.CoreState, expected: set[str], model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            served.core.tell(state)
            await until(lambda: served.frontend.link.state == state)
            await asyncio.sleep(0.01)
            assert await _serving(served) == expected

    run(scenario())


def test_health_watchers_see_the_core_go_and_come_back(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            stub: Any = health_pb2_grpc.HealthStub(served.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="tandem.Active"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            served.core.die()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await served.core.start()
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()

    run(scenario())


def test_reflection_names_the_services_and_their_methods(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(served.channel)
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="tandem.v1.GenerationService"),
            ]
            services, file = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
            names = {service.name for service in services.list_services_response.service}
            assert {*_SERVICES, "grpc.health.v1.Health"} <= names
            assert b"GetModelInfo" in file.file_descriptor_response.file_descriptor_proto[0]

    run(scenario())


def test_a_client_may_ping_through_a_silence(model: Path) -> None:
    """A server with gRPC's defaults ends this stream in GOAWAY too_many_pings after five pings."""

    async def scenario() -> None:
        async with serving(model) as served:
            pinging = dict(CHANNEL_OPTIONS) | {"grpc.keepalive_time_ms": 1000}
            async with aio.insecure_channel(f"127.0.0.1:{served.frontend.port}", list(pinging.items())) as channel:
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                call = stub.Generate(pb.GenerateRequest(text="a"))
                (submit,) = await served.core.submitted()
                await asyncio.sleep(6)
                served.core.give(submit, [7], length())
                assert [list(r.token_ids) for r in await collect(call)] == [[7]]

    run(scenario())


def test_a_stream_outlives_its_connection_s_age(model: Path) -> None:
    """Clients are asked to connect anew from time to time; what runs is not cut."""

    async def scenario() -> None:
        async with serving(model, max_connection_age=0.3) as served:
            call = served.stub.Generate(pb.GenerateRequest(text="a"))
            (submit,) = await served.core.submitted()
            await asyncio.sleep(0.6)
            later = served.stub.Generate(pb.GenerateRequest(text="a"))
            (other,) = (await served.core.submitted(2))[-1:]
            for running in (submit, other):
                served.core.give(running, [7], length())
            assert [[list(r.token_ids) for r in await collect(c)] for c in (call, later)] == [[[7]], [[7]]]

    run(scenario())


def test_draining_refuses_new_calls_and_finishes_running_ones(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model) as served:
            call = served.stub.Generate(pb.GenerateRequest(text="a"))
            (submit,) = await served.core.submitted()
            stopping = asyncio.create_task(served.frontend.stop())
            await asyncio.sleep(0.01)
            assert await _serving(served) == {"liveness"}
            with pytest.raises(aio.AioRpcError, match="shuts down") as error:
                await collect(served.stub.Generate(pb.GenerateRequest(text="a")))
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            served.core.give(submit, [7], length())
            assert [list(r.token_ids) for r in await collect(call)] == [[7]]
            await stopping

    run(scenario())


def test_streams_that_outlast_the_grace_period_end_unavailable(model: Path) -> None:
    async def scenario() -> None:
        async with serving(model, drain_timeout=0.1) as served:
            call = served.stub.Generate(pb.GenerateRequest(text="a"))
            await served.core.submitted()
            stopping = asyncio.create_task(served.frontend.stop())
            with pytest.raises(aio.AioRpcError, match="resume on another") as error:
                await collect(call)
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            await stopping

    run(scenario())


def test_frontends_share_their_port_and_each_tells_its_health_on_a_socket_of_its_own(
    model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with FakeCore(tmp_path / "core") as core:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            folder = tmp_path / "a #b ?c %41"
            folder.mkdir()
            own = [folder / f"health-{number}" for number in range(2)]
            configs = [FrontendConfig(model, tmp_path / "core", port=port, health_socket=health) for health in own]
            frontends = [Frontend(config) for config in configs]
            for frontend in frontends:
                await frontend.start()
            await until(lambda: core.connections == 2)
            for _ in frontends:
                async with make_channel(f"127.0.0.1:{port}") as channel:
                    await generation_pb2_grpc.GenerationServiceStub(channel).Tokenize(pb.TokenizeRequest(text="a"))
            for health in own:
                await until_serving(unix_endpoint(health), "readiness")
            for frontend in frontends:
                await frontend.stop()

    run(scenario())


@pytest.mark.parametrize(
    ("broken", "problem"), [("tokenizer.json", "tokenizer.json is missing"), ("config.json", "config.json is missing")]
)
def test_a_broken_model_folder_is_one_clear_line(broken: str, problem: str, tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    (folder / broken).unlink()

    async def scenario() -> None:
        with pytest.raises(StartupError, match=problem):
            Frontend(FrontendConfig(folder, Path("unused")))

    run(scenario())


def _start(code: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments])


def test_the_process_serves_without_torch_drains_on_sigterm_and_exits_0(model: Path) -> None:
    """The entry point itself, with a stream running when it is told to stop."""

    async def scenario(scratch: Path, port: int) -> None:
        async with FakeCore(scratch / "core") as core:
            config = FrontendConfig(model, scratch / "core", port=port)
            code = (
                "import sys; sys.argv = ['frontend', '--config', sys.argv[1]]\n"
                "from scheduler_svc.frontend.main import main\n"
                "main(); sys.exit(int(bool({'torch', 'transformers'} & set(sys.modules))))"
            )
            process = _start(code, to_json(config))
            try:
                await until(lambda: core.connections == 1)
                async with make_channel(f"127.0.0.1:{port}") as channel:
                    stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                    call = stub.Generate(pb.GenerateRequest(text="a"), wait_for_ready=True)
                    (submit,) = await core.submitted()
                    core.give(submit, [7])
                    await call.read()
                    process.send_signal(signal.SIGTERM)
                    await asyncio.sleep(0.2)
                    core.give(submit, [8], length())
                    assert [list(r.token_ids) for r in await rest(call)] == [[8]]
                await until(lambda: process.poll() is not None)
                assert process.returncode == 0
            finally:
                process.kill()
                process.wait()

    with tempfile.TemporaryDirectory() as scratch, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        run(scenario(Path(scratch), port))
