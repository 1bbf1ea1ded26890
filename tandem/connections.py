"""A client's connections to one or several endpoints, and whose turn it is.

One HTTP/2 connection is one frontend process of a server, so there are several to each endpoint. Knows nothing of
requests.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from shared.dialer import Dialer
from shared.errors import Aborted, TandemError, Unavailable
from shared.pb import generation_pb2_grpc as rpc
from shared.rpc import ABORTED, RETRY_AFTER, error_from_status
from shared.tls import explained

C = TypeVar("C")
Stub = Any
"""A GenerationServiceStub: its methods are those of gRPC's synchronous or asynchronous interface. Holds its channel."""


class Connections(Generic[C]):
    """Channels of type C to every endpoint, used in turn. Safe to share between threads.

    When the dialer's files change, all channels are made anew; an old one lives until the last stream on it has ended.
    """

    def __init__(
        self, endpoints: str | Sequence[str], per_endpoint: int, dialer: Dialer, connect: Callable[[str], C]
    ) -> None:
        """`connect` is the dialer's way to make a channel. ValueError where there is no endpoint or no connection."""
        self._targets = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not self._targets or per_endpoint < 1:
            raise ValueError("at least one endpoint and one connection to it are needed")
        self._per_endpoint = per_endpoint
        self._dialer = dialer
        self._connect = connect
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()
        self._firsts = itertools.cycle(range(len(self._targets)))
        self._credentials = dialer.credentials
        self._turns = self._dial()

    def _dial(self) -> list[Iterator[Stub]]:
        return [itertools.cycle([self._stub(target) for _ in range(self._per_endpoint)]) for target in self._targets]

    def _stub(self, target: str) -> Stub:
        channel: Any = self._connect(target)
        self._channels.add(channel)
        stub: Stub = rpc.GenerationServiceStub(channel)
        stub.channel = channel
        return stub

    @property
    def endpoints(self) -> int:
        """How many there are."""
        return len(self._targets)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call."""
        return self._dialer.metadata

    @property
    def channels(self) -> list[C]:
        """All that live."""
        return list(self._channels)

    def route(self) -> Iterator[Stub]:
        """For the attempts of one request: endpoint after endpoint for ever, beginning at another one each time."""
        first = next(self._firsts)
        for turn in itertools.count(first):
            if (credentials := self._dialer.credentials) is not self._credentials:
                self._credentials, self._turns = credentials, self._dial()
            yield next(self._turns[turn % len(self._turns)])

    def each(self) -> Iterator[Stub]:
        """One stub of every endpoint."""
        return itertools.islice(self.route(), self.endpoints)


def error_of(error: Any) -> TandemError:
    """The server's error; also what gRPC itself reports, as the kind that has its status code.

    A call that neither its caller nor an Abort has ended is Unavailable: its server stops.
    """
    trailers = dict(error.trailing_metadata() or ())
    details = explained(error.details() or "")
    retry_after = str(trailers.get(RETRY_AFTER, ""))  # gRPC itself reads it: negative or none of a number means never
    retry_after_ms = int(retry_after) if retry_after.isdecimal() and len(retry_after) < 10 else 0
    found = error_from_status(error.code().value[0], details, retry_after_ms)
    if isinstance(found, Aborted) and ABORTED not in trailers:
        return Unavailable(f"the server ended the call ({details}): it may be shutting down")
    return found


class Asking:
    """One question to endpoint after endpoint: until one of them gives an answer that is good enough."""

    def __init__(self, good_enough: Callable[[Any], bool]) -> None:
        self._good_enough = good_enough
        self._answer: Any = None
        self._unavailable: TandemError | None = None

    def is_settled_by(self, answer: Any) -> bool:
        """Whether no other endpoint needs to be asked."""
        self._answer = answer
        return self._good_enough(answer)

    def failed(self, error: Any) -> None:
        """Raises what no other endpoint would judge differently."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise error_of(error) from None
        self._unavailable = error_of(error)

    def answer(self) -> Any:
        """The last one. Raises Unavailable where there was none."""
        if self._answer is None:
            assert self._unavailable is not None, "every endpoint was asked"
            raise self._unavailable
        return self._answer
