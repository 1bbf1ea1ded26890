"""A client's connections to one or several endpoints, and whose turn it is.

One HTTP/2 connection is one frontend process of a server, so there are several to each endpoint. Knows nothing of
requests.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import grpc

from shared.dialer import Dialer
from shared.errors import Standby, TandemError
from shared.pb import generation_pb2_grpc as rpc
from shared.rpc import ACTIVE_ENDPOINT, RETRY_AFTER, error_from_status
from shared.tls import explained
from tandem.activity import Activity, Follow

DOUBT_S = 2.0
"""How long an endpoint that has failed is not preferred, whatever is known of it: a stopped server says nothing new."""

C = TypeVar("C")
Stub = Any
"""A GenerationServiceStub: its methods are those of gRPC's synchronous or asynchronous interface. Holds its channel."""


class Connections(Generic[C]):
    """Channels of type C to every endpoint, used in turn. Safe to share between threads.

    When the dialer's files change, all channels are made anew; an old one lives until the last stream on it has ended.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        per_endpoint: int,
        dialer: Dialer,
        connect: Callable[[str], C],
        follow: Follow,
    ) -> None:
        """`connect` is the dialer's way to make a channel. ValueError where there is no endpoint or no connection."""
        self._targets = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not self._targets or per_endpoint < 1:
            raise ValueError("at least one endpoint and one connection to it are needed")
        self._per_endpoint = per_endpoint
        self._dialer = dialer
        self._connect = connect
        self._follow = follow
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()
        self._firsts = itertools.cycle(range(len(self._targets)))
        self._credentials = dialer.credentials
        self._activities: list[Activity] = []
        self._turns: list[Iterator[Stub]] = []
        self._failed_at: dict[int, float] = {}
        """When an endpoint has last failed."""
        self._dial()

    def _dial(self) -> None:
        numbers = range(len(self._targets))
        self._turns = [itertools.cycle([self._stub(number) for _ in range(self._per_endpoint)]) for number in numbers]
        if len(self._targets) > 1:
            self._activities = [self._follow(self._dialer, target) for target in self._targets]
            self._channels.update(activity.channel for activity in self._activities)

    def _stub(self, endpoint: int) -> Stub:
        channel: Any = self._connect(self._targets[endpoint])
        self._channels.add(channel)
        stub: Stub = rpc.GenerationServiceStub(channel)
        stub.channel, stub.endpoint = channel, endpoint
        return stub

    def failed(self, stub: Stub) -> None:
        """A call of the stub has found its server unavailable."""
        self._failed_at[stub.endpoint] = time.monotonic()

    def _is_preferred(self, endpoint: int) -> bool:
        if not self._activities or time.monotonic() - self._failed_at.get(endpoint, -DOUBT_S) < DOUBT_S:
            return False
        return self._activities[endpoint].is_active

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
        """For the attempts of one request: endpoint after endpoint for ever, beginning at another one each time. Where
        some say that they are active, only those."""
        first = next(self._firsts)
        for turn in itertools.count(first):
            yield self._next(self._order(turn)[0])

    def each(self) -> Iterator[Stub]:
        """One stub of every endpoint, the active ones first."""
        return map(self._next, self._order(next(self._firsts)))

    def _order(self, turn: int) -> list[int]:
        """All endpoints, in turn, the active ones first."""
        order = [(turn + step) % self.endpoints for step in range(self.endpoints)]
        return sorted(order, key=self._is_preferred, reverse=True)

    def _next(self, endpoint: int) -> Stub:
        if (credentials := self._dialer.credentials) is not self._credentials:
            self._credentials = credentials
            self._dial()
        return next(self._turns[endpoint])


def error_of(error: Any) -> TandemError:
    """The server's error; also what gRPC itself reports, as the kind that has its status code."""
    trailers = dict(error.trailing_metadata() or ())
    details = explained(error.details() or "")
    if ACTIVE_ENDPOINT in trailers:
        return Standby(details, trailers[ACTIVE_ENDPOINT])
    return error_from_status(error.code().value[0], details, int(trailers.get(RETRY_AFTER, 0)))


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
