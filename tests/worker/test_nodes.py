"""Nodes of a group meet in any order, again and again, agree or say on what they don't, and notice each other's end."""

import asyncio
import contextlib
import errno
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shared.errors import StartupError
from shared.model_config import load_model_config
from shared.ports import find_free
from tandem import tiny
from tests.patience import PATIENCE_S
from worker_svc.config import WorkerConfig
from worker_svc.node_link import Kind, NodeLink, NodeLost
from worker_svc.node_meeting import Meeting, _Arrivals, _try, _Waiting, meet
from worker_svc.nodes import difference, terms
from worker_svc.routes import interface_to

TERMS = {"--dtype": "float64", "version": "1"}


def config(node_rank: int, port: int, nnodes: int = 2, timeout: float = 5.0, host: str = "127.0.0.1") -> WorkerConfig:
    return WorkerConfig(
        "model",
        tensor_parallel=nnodes,
        nnodes=nnodes,
        node_rank=node_rank,
        master_addr=host,
        master_port=port,
        step_timeout=timeout,
    )


def run(scenario: Callable[[int], Any]) -> None:
    """With a free port for node 0."""
    asyncio.run(asyncio.wait_for(scenario(find_free("127.0.0.1")), PATIENCE_S))


def node(*arguments: Any, terms: dict[str, str] = TERMS, **settings: Any) -> "asyncio.Task[Meeting]":
    """One that meets the others."""
    return asyncio.create_task(meet(config(*arguments, **settings), terms))


async def closed(*meetings: Meeting) -> None:
    for meeting in meetings:
        for link in meeting.links:
            await link.close()
        if meeting.listener is not None:
            meeting.listener.close()


async def dialled(port: int) -> asyncio.StreamWriter:
    """A connection to node 0 of one that is no node."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return (await asyncio.open_connection("127.0.0.1", port))[1]
        await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def test_nodes_that_come_in_any_order_meet() -> None:
    async def scenario(port: int) -> None:
        late = node(2, port, 3)
        await asyncio.sleep(0)
        meetings = await asyncio.gather(late, node(0, port, 3), node(1, port, 3))
        stores = [meeting.store for meeting in meetings]
        assert stores[0] == stores[1] == stores[2] and stores[0] is not None
        assert stores[0].port == meetings[1].listener.getsockname()[1]  # type: ignore[union-attr]
        assert [len(meeting.links) for meeting in meetings] == [1, 2, 1]
        meetings[0].links[0].say(Kind.DRAIN)
        (link,) = (link for link in meetings[1].links if link.name == "node 2 (127.0.0.1)")
        await link.until_said(Kind.DRAIN)
        await closed(*meetings)

    run(scenario)


def test_another_life_of_the_group_has_another_epoch() -> None:
    async def scenario(port: int) -> None:
        epochs = []
        for _ in range(2):
            meetings = await asyncio.gather(node(0, port), node(1, port))
            epochs.append(meetings[1].store.epoch)  # type: ignore[union-attr]
            await closed(*meetings)
        assert epochs[0] != epochs[1]

    run(scenario)


def test_a_node_that_differs_is_told_so_and_the_right_one_is_taken() -> None:
    async def scenario(port: int) -> None:
        first = node(0, port)
        with pytest.raises(StartupError, match="--dtype: node 0 has float64, node 1 has bfloat16"):
            await node(1, port, terms={**TERMS, "--dtype": "bfloat16"})
        with pytest.raises(StartupError, match="version: node 0 has 1, node 1 has none"):
            await node(1, port, terms={"--dtype": "float64"})
        await closed(*await asyncio.gather(first, node(1, port)))

    run(scenario)


def test_a_second_node_of_the_same_rank_waits_for_the_first_one_s_end() -> None:
    async def scenario(port: int) -> None:
        zero, one = node(0, port, 3), node(1, port, 3)
        with capture_logs() as logs:
            other = node(1, port, 3)
            await until(lambda: any("is --node-rank given twice?" in entry["reason"] for entry in logs))
        one.cancel()
        await closed(*await asyncio.gather(zero, other, node(2, port, 3)))

    run(scenario)


def test_who_is_sent_away_again_and_again_says_why_and_not_each_time() -> None:
    """Ten seconds are between two lines that say the same; there are hundreds of tries within them."""

    async def scenario(port: int) -> None:
        tries = 0

        async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal tries
            tries += 1
            writer.write(b'{"kind": "busy", "reason": "another one is here"}\n')
            await reader.read()
            writer.close()

        server = await asyncio.start_server(busy, "127.0.0.1", port)
        with capture_logs() as logs, mock.patch("worker_svc.node_meeting._PAUSE_S", 0.001):
            one = node(1, port)
            await until(lambda: tries > 20)
        one.cancel()
        server.close()
        assert len(logs) < tries / 2 and any("another one is here" in entry["reason"] for entry in logs), logs

    run(scenario)


def test_nodes_whose_patience_differs_are_told_so() -> None:
    """One that counts as silent before it has said anything would end the group again and again."""
    given = {"tensor_parallel": 2, "nnodes": 2, "master_addr": "127.0.0.1"}
    patient, hasty = (WorkerConfig(str(tiny.DENSE), step_timeout=timeout, **given) for timeout in (10.0, 0.5))  # type: ignore[arg-type]
    model = load_model_config(tiny.DENSE)
    told = difference(terms(patient, model), terms(hasty, model), 1)
    assert told == "--step-timeout: node 0 has 10.0, node 1 has 0.5"


def test_strangers_at_the_port_do_not_disturb() -> None:
    async def scenario(port: int) -> None:
        zero = node(0, port)
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"kind": "hello"}\n', b"x" * (1 << 17), b""):
            writer = await dialled(port)
            writer.write(said)
            writer.close()
        await closed(*await asyncio.gather(zero, node(1, port)))

    run(scenario)


def test_a_node_that_stops_while_a_stranger_is_silent_says_nothing_of_it() -> None:
    problems: list[dict[str, Any]] = []

    async def scenario(port: int) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, problem: problems.append(problem))
        zero = node(0, port)
        await dialled(port)
        await until(lambda: any("NodeLink._read" in str(task) for task in asyncio.all_tasks()))
        zero.cancel()

    run(scenario)
    assert problems == []


class Deaf:
    """The writing end of a connection whose reader does not matter."""

    def __init__(self, peername: tuple[str, int] | None = ("127.0.0.1", 1)) -> None:
        self.closed = False
        self._peername = peername

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return self._peername

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    async def wait_closed(self) -> None:
        pass


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
KINDS = st.sampled_from([*Kind, "other"])
MESSAGES = st.fixed_dictionaries(
    {"kind": KINDS},
    optional={name: JSON | st.integers(0, 3) for name in ("node_rank", "terms", "reason", "port", "epoch")},
)
LINES = st.lists((MESSAGES | JSON).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=50), max_size=4)


def heard(lines: list[bytes]) -> asyncio.StreamReader:
    """A connection on which these came, and then its end."""
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(line + b"\n" for line in lines))
    reader.feed_eof()
    return reader


@settings(max_examples=40)
@given(LINES)
@example([b"[" * 50_000])
@example([b'{"kind": "hello", "node_rank": Infinity, "terms": {}}'])
def test_whatever_comes_to_node_0_it_goes_on(lines: list[bytes]) -> None:
    async def scenario() -> None:
        arrivals = _Arrivals(config(0, 1), TERMS)
        await arrivals.accept(heard(lines), Deaf())  # type: ignore[arg-type]
        assert arrivals.missing() == [1]

    asyncio.run(scenario())


@settings(max_examples=40)
@given(LINES)
def test_whatever_node_0_says_the_other_one_names_it(lines: list[bytes]) -> None:
    async def scenario() -> None:
        link = NodeLink("node 0", heard(lines), Deaf(), 5.0)  # type: ignore[arg-type]
        with (
            mock.patch("worker_svc.node_meeting._dial", mock.AsyncMock(return_value=link)),
            contextlib.suppress(NodeLost, StartupError),
        ):
            meeting = await _try(config(1, 1), TERMS, _Waiting())
            assert meeting.store is not None and isinstance(meeting.store.port, int)

    asyncio.run(scenario())


def test_who_is_gone_before_anybody_knows_who_it_was_is_lost_like_others() -> None:
    """A connection that was reset at once has no peer that the system could name."""

    async def scenario(port: int) -> None:
        gone = NodeLink("node 0", heard([]), Deaf(None), 5.0)  # type: ignore[arg-type]
        with pytest.raises(NodeLost, match="node 0 has closed its connection"):
            await gone.until_said(Kind.START)
        await gone.close()

    run(scenario)


def test_of_a_node_that_comes_again_and_again_one_connection_is_kept() -> None:
    async def scenario(port: int) -> None:
        hello = json.dumps({"kind": "hello", "node_rank": 1, "terms": TERMS}).encode()
        arrivals, writers, others = _Arrivals(config(0, 1, 3), TERMS), [Deaf(), Deaf(), Deaf()], asyncio.all_tasks()
        for writer in writers:
            await arrivals.accept(heard([hello]), writer)  # type: ignore[arg-type]
            await until(lambda: bool(arrivals.links[1].lost))
        assert [writer.closed for writer in writers] == [True, True, False]
        await until(lambda: len(asyncio.all_tasks() - others) == 1)  # the beat of the last one

    run(scenario)


@pytest.mark.parametrize("host", [".tandem.svc", "a..b", "a" * 64])
def test_what_can_be_no_name_is_told_and_waited_for(host: str) -> None:
    async def scenario(port: int) -> None:
        with capture_logs() as logs:
            waits = node(1, port, host=host)
            await until(lambda: bool(logs) or waits.done())
        waits.cancel()
        assert "a part of it is empty or too long" in logs[0]["reason"]

    run(scenario)


@contextlib.contextmanager
def records(found: list[str]) -> Iterator[None]:
    """The addresses of the name `leader`."""
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: Any, *args: Any, **options: Any) -> Any:
        if host != "leader":
            return real(host, port, *args, **options)
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    with mock.patch.object(socket, "getaddrinfo", getaddrinfo):
        yield


def test_a_name_is_asked_for_until_it_leads_to_node_0() -> None:
    """It has no address at first, then that of a pod that is gone, which is no host's here."""

    async def scenario(port: int) -> None:
        found: list[str] = []
        with records(found), capture_logs() as logs:
            nodes = [node(number, port, host="leader") for number in range(2)]
            for addresses, told in ([], "no such name"), (["192.0.2.77"], "is no address of this node"):
                found[:] = addresses
                await until(lambda told=told: any(told in entry["reason"] for entry in logs))
            found[:] = ["127.0.0.1"]
            await closed(*await asyncio.gather(*nodes))

    run(scenario)


@pytest.mark.parametrize("number", [errno.EADDRINUSE, errno.EACCES])
def test_a_port_that_node_0_never_gets_is_told_at_once(number: int) -> None:
    async def scenario(port: int) -> None:
        with (
            mock.patch("asyncio.start_server", side_effect=OSError(number, os.strerror(number))),
            pytest.raises(
                StartupError, match=rf"can't listen on .*{os.strerror(number)}.*: choose another --master-port"
            ),
        ):
            await meet(config(0, port), TERMS)

    run(scenario)


def test_a_firewall_between_the_ranks_is_told_to_both_nodes() -> None:
    """It lets --master-port pass alone: ranks would wait for each other without a word."""
    real = asyncio.open_connection

    async def scenario(port: int) -> None:
        async def firewall(host: str, to: int) -> Any:
            if to != port:
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            return await real(host, to)

        with mock.patch("asyncio.open_connection", firewall), capture_logs() as logs:
            one = node(1, port)
            zero = await node(0, port)
            told = f"127.0.0.1:{zero.store.port} can't be reached .*: let all TCP ports pass between the nodes"  # type: ignore[union-attr]
            with pytest.raises(NodeLost, match=rf"node 1 \(127.0.0.1\) has failed: {told}"):
                await zero.links[0].until_said(Kind.END)
            await until(lambda: any(re.search(told, entry["reason"]) for entry in logs))
        one.cancel()
        await closed(zero)

    run(scenario)


def test_a_node_0_that_does_not_answer_is_told() -> None:
    async def never(host: str, port: int) -> None:
        await asyncio.Event().wait()

    async def scenario(port: int) -> None:
        patience = mock.patch("worker_svc.node_meeting._PATIENCE_S", 0.01)
        with mock.patch("asyncio.open_connection", never), patience, capture_logs() as logs:
            one = node(1, port)
            await until(lambda: bool(logs))
        one.cancel()
        assert logs[0]["reason"] == f"node 0 at 127.0.0.1:{port}: does not answer"

    run(scenario)


def test_a_node_that_ends_is_noticed() -> None:
    async def scenario(port: int) -> None:
        zero, one = await asyncio.gather(node(0, port), node(1, port))
        await closed(one)
        with pytest.raises(NodeLost, match=r"node 1 \(127.0.0.1\) has closed its connection"):
            await zero.links[0].until_said(Kind.END)
        await closed(zero)

    run(scenario)


def test_why_a_node_fails_is_told() -> None:
    async def scenario(port: int) -> None:
        zero, one = await asyncio.gather(node(0, port), node(1, port))
        one.links[0].say(Kind.FAILED, reason="rank 1 was killed")
        await closed(one)
        with pytest.raises(NodeLost, match="has failed: rank 1 was killed"):
            await zero.links[0].until_said(Kind.END)
        await closed(zero)

    run(scenario)


def test_a_node_that_is_silent_is_noticed() -> None:
    """It still holds its connection."""

    async def scenario(port: int) -> None:
        zero = node(0, port, timeout=0.5)
        writer = await dialled(port)
        writer.write(json.dumps({"kind": "hello", "node_rank": 1, "terms": TERMS}).encode() + b"\n")
        meeting = await zero
        with pytest.raises(NodeLost, match="has been silent"):
            await meeting.links[0].until_said(Kind.END)
        await closed(meeting)
        writer.close()

    run(scenario)


def test_the_interface_to_an_address() -> None:
    assert interface_to("127.0.0.2") == "lo"
    assert interface_to("::1") == "lo"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"nnodes": 0}, "--nnodes 0: at least 1"),
        ({"nnodes": 2, "master_addr": "leader", "node_rank": 2}, "--node-rank 2: 0 to 1"),
        ({"nnodes": 2}, "--nnodes 2: --master-addr, the address of node 0, is needed"),
        ({"master_port": 0}, "--master-port 0: 1 to 65535"),
    ],
)
def test_settings_that_make_no_group(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(StartupError, match=problem):
        WorkerConfig("model", **settings)


def test_the_ranks_of_a_node() -> None:
    settings = {"nnodes": 2, "master_addr": "leader", "tensor_parallel": 8}
    assert [list(WorkerConfig("model", node_rank=rank, **settings).ranks) for rank in range(2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
