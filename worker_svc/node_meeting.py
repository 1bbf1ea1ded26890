"""How the nodes of a group find each other: node 0 listens, the others come, in any order and as often as they must.

Each life of a launcher meets once. Who restarts alone makes the others end, and waits here until they are back.
"""

import asyncio
import errno
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import TypeVar

import structlog

from shared.errors import StartupError
from shared.ports import address
from shared.resolve import host_of, resolve
from worker_svc.config import WorkerConfig
from worker_svc.node_link import Body, Kind, NodeLink, NodeLost
from worker_svc.nodes import difference
from worker_svc.routes import why_no_answer
from worker_svc.store import Store

_PAUSE_S = 0.2  # between two tries
_PATIENCE_S = 3.0  # with who was dialled, or has dialled
_REMIND_S = 10.0

_log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Meeting:
    """All nodes have come; of one alone there is nothing to know."""

    store: Store | None = None
    links: list[NodeLink] = field(default_factory=list)
    """Of node 0 to all others, of another one to node 0."""
    listener: socket.socket | None = None
    """Of node 0, for rank 0: bound to the store's port."""


async def meet(config: WorkerConfig, terms: Mapping[str, str]) -> Meeting:
    """Waits for all nodes, and tells what it waits for. Raises StartupError where the nodes don't fit each other."""
    return await (_join(config, terms) if config.node_rank else _lead(config, terms))


@dataclass
class _Waiting:
    """Tells the log what is waited for, the same only every ten seconds: tries may end in two ways in turn."""

    told: dict[str, float] = field(default_factory=dict)

    def tell(self, reason: str) -> None:
        now = monotonic()
        self.told = {told: at for told, at in self.told.items() if now - at < _REMIND_S}
        if reason not in self.told:
            self.told[reason] = now
            _log.info("waiting for the other nodes", reason=reason)


@dataclass
class _Arrivals:
    """Node 0's: who has come so far."""

    config: WorkerConfig
    terms: Mapping[str, str]
    links: dict[int, NodeLink] = field(default_factory=dict)
    arriving: set[asyncio.Task[None]] = field(default_factory=set)

    def come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """No coroutine: asyncio would report the end of one that is cancelled when the process stops as an error."""
        task = asyncio.create_task(self.accept(reader, writer))
        self.arriving.add(task)
        task.add_done_callback(self.arriving.discard)

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One that dials: it stays where it says hello, fits, and is the only one of its rank."""
        link = NodeLink("another node", reader, writer, self.config.step_timeout)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await link.until_said(Kind.HELLO)
            node_rank, terms = _introduced(link.said[Kind.HELLO])
        except (NodeLost, TimeoutError):
            await link.close()
            return
        link.name = f"node {node_rank} ({link.peer_host})"
        if problem := difference(self.terms, terms, node_rank):
            _log.warning("refused a node", node=link.name, problem=problem)
            link.say(Kind.REFUSED, reason=problem)
        elif not 0 < node_rank < self.config.nnodes:
            link.say(Kind.REFUSED, reason=f"--node-rank {node_rank}: there are {self.config.nnodes} nodes")
        elif node_rank in self.missing():
            former, self.links[node_rank] = self.links.get(node_rank), link
            if former is not None:
                await former.close()
            return
        else:
            link.say(Kind.BUSY, reason=f"{self.links[node_rank].name} is here: is --node-rank given twice?")
        await link.close()

    def missing(self) -> list[int]:
        """Ranks of nodes that have not come, or are lost again."""
        return [rank for rank in range(1, self.config.nnodes) if rank not in self.links or self.links[rank].lost]


def _introduced(hello: Body) -> tuple[int, Mapping[str, str]]:
    node_rank, terms = hello.get("node_rank"), hello.get("terms")
    if not isinstance(node_rank, int) or not isinstance(terms, dict):
        raise NodeLost("is no node")
    return node_rank, terms


async def _lead(config: WorkerConfig, terms: Mapping[str, str]) -> Meeting:
    waiting, arrivals = _Waiting(), _Arrivals(config, terms)
    server = await _listen(config, arrivals, waiting)
    host = server.sockets[0].getsockname()[0]
    try:
        while missing := arrivals.missing():
            waiting.tell(f"at {address(host, config.master_port)} for --node-rank {', '.join(map(str, missing))}")
            await asyncio.sleep(_PAUSE_S)
    finally:
        server.close()  # who comes later comes for the next life of this node
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    store = Store(host, listener.getsockname()[1], secrets.token_hex(8), config.nnodes)
    for link in arrivals.links.values():
        link.say(Kind.START, port=store.port, epoch=store.epoch)
    return Meeting(store, list(arrivals.links.values()), listener)


async def _listen(config: WorkerConfig, arrivals: _Arrivals, waiting: _Waiting) -> asyncio.Server:
    """A pod's own name may be told later than it starts, or lead to the address that it had before."""
    while True:
        try:
            return await _each(config, lambda host: asyncio.start_server(arrivals.come, host, config.master_port))
        except OSError as error:
            problem = error.strerror or error
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                where = _master(config)
                raise StartupError(f"can't listen on {where} ({problem}): choose another --master-port") from None
            waiting.tell(f"--master-addr {config.master_addr} is no address of this node ({problem})")
        await asyncio.sleep(_PAUSE_S)


async def _join(config: WorkerConfig, terms: Mapping[str, str]) -> Meeting:
    waiting = _Waiting()
    while True:
        try:
            return await _try(config, terms, waiting)
        except (OSError, NodeLost) as error:
            waiting.tell(f"node 0 at {_master(config)}: {str(error) or 'does not answer'}")
        await asyncio.sleep(_PAUSE_S)


async def _try(config: WorkerConfig, terms: Mapping[str, str], waiting: _Waiting) -> Meeting:
    """Raises OSError and NodeLost, after which another try may help, and StartupError."""
    link = await _dial(config)
    try:
        link.say(Kind.HELLO, node_rank=config.node_rank, terms=terms)
        waiting.tell(f"node 0 at {_master(config)} is there, not yet all others")
        kind = await link.until_said(Kind.START, Kind.REFUSED, Kind.BUSY)
        said = link.said[kind]
        if kind is Kind.REFUSED:
            raise StartupError(f"node 0 at {_master(config)} refuses this node: {said.get('reason')}")
        if kind is Kind.BUSY:
            raise NodeLost(str(said.get("reason")))
        port, epoch = said.get("port"), said.get("epoch")
        if not isinstance(port, int) or not 0 < port < 1 << 16 or not isinstance(epoch, str):
            raise NodeLost("says what is no start: another program uses --master-port")
        if problem := await why_no_answer(link.peer_host, port, _PATIENCE_S):
            link.check()
            problem = f"{address(link.peer_host, port)} {problem}: let all TCP ports pass between the nodes"
            link.say(Kind.FAILED, reason=problem)
            raise NodeLost(problem)
        return Meeting(Store(link.peer_host, port, epoch, config.nnodes), [link])
    except BaseException:
        await link.close()
        raise


async def _dial(config: WorkerConfig) -> NodeLink:
    async def dial(host: str) -> NodeLink:
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await asyncio.open_connection(host, config.master_port)
        return NodeLink(f"node 0 ({host})", reader, writer, config.step_timeout)

    return await _each(config, dial)


async def _each(config: WorkerConfig, attempt: Callable[[str], Awaitable[T]]) -> T:
    """What comes of the first address of node 0 that takes the attempt. Raises OSError of the last one."""
    problem = OSError(f"{config.master_addr} has no address")
    for where in await resolve(_master(config)):
        try:
            return await attempt(host_of(where))
        except OSError as error:
            problem = error
    raise problem


def _master(config: WorkerConfig) -> str:
    return address(config.master_addr or "", config.master_port)
