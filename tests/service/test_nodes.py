"""A worker group of two nodes: the tokens of one process, and whatever ends on either node, every stream goes on.

The oracle is an undisturbed worker of one process, in float64, where a replay gives the same tokens.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from grpc import aio

from shared.pb import generation_pb2 as pb
from shared.ports import find_free
from shared.rpc import until_serving
from tests.patience import PATIENCE_S
from tests.service.pod import Pod
from tests.service.tandem_process import Output, Tandem, follow, generate_all, running, until_idle

STEP_TIMEOUT = ["--step-timeout", "2"]
TOKENS_BEFORE = 10
HOSTS = ("127.0.0.1", "127.0.0.2")


class Scheduler(Tandem):
    command = "scheduler"


class Group:
    """Two nodes, each kept running; what one process gave, and the scheduler's endpoint."""

    def __init__(self, folder: Path, endpoint: str, port: int, undisturbed: list[Output]) -> None:
        self.endpoint = endpoint
        self.port = port
        self.undisturbed = undisturbed
        group = ["--tensor-parallel", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"]
        group += ["--master-port", str(find_free("127.0.0.1"))]
        self.nodes = [
            Pod(folder / f"node-{rank}", *worker(port, host), *group, "--node-rank", str(rank))
            for rank, host in enumerate(HOSTS)
        ]
        self.until_ready()
        self.nodes[1].until_said("tandem worker node 1 of 2 ready (ranks 1, health on 127.0.0.2")

    def until_ready(self) -> None:
        """Waits until both nodes say so to probes of the same kind."""
        for host in HOSTS:
            asyncio.run(asyncio.wait_for(until_serving(f"{host}:{self.port}", "readiness"), PATIENCE_S))


def worker(port: int, host: str = "127.0.0.1") -> list[str]:
    common = ["--model", "tiny", "--dtype", "float64", "--kv-cache-memory", "32", *STEP_TIMEOUT]
    return ["worker", *common, "--host", host, "--port", str(port)]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    folder, port = tmp_path_factory.mktemp("nodes"), find_free("127.0.0.1")
    arguments = ["--model", "tiny", "--workers", f"127.0.0.1:{port}", *STEP_TIMEOUT]
    with contextlib.ExitStack() as stack:
        alone = Pod(folder / "alone", *worker(port))
        stack.callback(alone.stop)
        scheduler = stack.enter_context(running(folder / "scheduler", *arguments, kind=Scheduler))
        asyncio.run(asyncio.wait_for(until_serving(scheduler.endpoint, "tandem.Active"), PATIENCE_S))
        undisturbed = asyncio.run(generate_all(scheduler.endpoint, requests()))
        alone.stop()
        group = Group(folder, scheduler.endpoint, port, undisturbed)
        for node in group.nodes:
            stack.callback(node.stop)
        yield group


def requests() -> list[pb.GenerateRequest]:
    """Greedy and sampled ones."""
    made = [pb.GenerateRequest(text="It is a truth universally" + " and" * number) for number in range(6)]
    for number, request in enumerate(made):
        request.sampling.seed = number
        request.sampling.temperature = number % 2 * 0.8
        request.stopping.max_tokens = 150
        request.stopping.ignore_eos = True
    return made


def survives(group: Group, fault: Callable[[], None]) -> None:
    """What happens in the midst of streams changes none of them."""

    async def disturbed() -> list[Output]:
        outputs = [Output() for _ in requests()]
        async with aio.insecure_channel(group.endpoint) as channel:
            reading = [follow(channel, *pair) for pair in zip(requests(), outputs, strict=True)]
            streams = asyncio.gather(*reading)
            async with asyncio.timeout(PATIENCE_S):
                while not all(len(output.token_ids) >= TOKENS_BEFORE for output in outputs):
                    await asyncio.sleep(0.005)
            assert not streams.done(), "the run was too short to disturb"
            await asyncio.to_thread(fault)
            await asyncio.wait_for(streams, PATIENCE_S)
        return outputs

    for output, expected in zip(asyncio.run(disturbed()), group.undisturbed, strict=True):
        assert (output.token_ids, output.text, output.finish) == (expected.token_ids, expected.text, expected.finish)
    asyncio.run(until_idle(group.endpoint))


def kill_a_rank(group: Group) -> None:
    group.nodes[1].ranks()[0].kill()


def kill_the_first_launcher(group: Group) -> None:
    group.nodes[0].main().kill()


def stop_the_second_launcher(group: Group) -> None:
    """It is there again when node 0 has given it up, and still believes in a group that is gone."""
    stopped = group.nodes[1].main()
    stopped.send_signal(signal.SIGSTOP)
    try:
        group.nodes[0].until_ended(len(group.nodes[0].statuses) + 1)
    finally:
        stopped.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("fault", [kill_a_rank, kill_the_first_launcher, stop_the_second_launcher])
def test_both_nodes_end_and_meet_again(group: Group, fault: Callable[[Group], None]) -> None:
    """Each node is started again on its own, as soon as it has ended."""
    lives = len(group.nodes[0].statuses) + 1

    def happens() -> None:
        ranks: list[psutil.Process] = [rank for node in group.nodes for rank in node.ranks()]
        fault(group)
        for node in group.nodes:
            assert node.until_ended(lives) in (1, -signal.SIGKILL), node.log.read_text()
        _, alive = psutil.wait_procs(ranks, timeout=PATIENCE_S)
        assert not alive, f"left behind: {alive}"

    survives(group, happens)
    group.until_ready()


def test_both_nodes_are_told_to_stop_at_once_and_streams_end_in_peace(group: Group) -> None:
    """As Kubernetes stops all pods of a group. The second node is told a moment earlier: it must wait for the first."""
    lives = len(group.nodes[0].statuses) + 1

    def stop() -> None:
        for node in reversed(group.nodes):
            node.let_end()
            node.main().terminate()

    survives(group, stop)
    assert [node.until_ended(lives) for node in group.nodes] == [0, 0]
