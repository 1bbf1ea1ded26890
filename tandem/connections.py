"""A client's connections to one or several endpoints, and whose turn it is.

One HTTP/2 connection is one frontend process of a server, so there are several to each endpoint. Knows nothing of
requests.
"""

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from grpc import StatusCode

from shared.decoding import UNDECODABLE
from shared.dialer import Dialer
from shared.errors import Aborted, RequestFailed, Standby, TandemError, Unavailable
from shared.pb import generation_pb2_grpc as rpc
from shared.resolve import is_name, named
from shared.rpc import ABORTED, ACTIVE_ENDPOINT, RETRY_AFTER, error_from_status
from shared.security import ClientSecurity
from shared.tls import explained
from tandem.activity import Activity, Follow
from tandem.address_book import AddressBook

DOUBT_S = 2.0
"""How long an endpoint that has failed is not preferred, whatever is known of it: a stopped server says nothing new."""

_UNDECODABLE = "Exception deserializing response!"
"""What gRPC itself tells clients for threads."""

C = TypeVar("C")
Stub = Any
"""A GenerationServiceStub: its methods are those of gRPC's synchronous or asynchronous interface. Holds its channel."""


class _Endpoint:
    """One address: its stubs, used in turn, and what is known of its server."""

    def __init__(self, target: str, activity: Activity | None) -> None:
        self.target = target
        self.activity = activity
        self.failed_at = -math.inf
        self.stubs: Iterator[Stub] = iter(())

    @property
    def is_preferred(self) -> bool:
        """Its server says that it is active, and has not failed lately."""
        doubted = time.monotonic() - self.failed_at < DOUBT_S
        return not doubted and self.activity is not None and self.activity.is_active


class Connections(Generic[C]):
    """Channels of type C to every endpoint, used in turn. Safe to share between threads.

    When the dialer's files change, all channels are made anew; an old one lives until the last stream on it has ended.
    So does one to an address that its name has no more.
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
        given = [endpoints] if isinstance(endpoints, str) else list(endpoints)
        if not given or per_endpoint < 1:
            raise ValueError("at least one endpoint and one connection to it are needed")
        self._book = AddressBook(given)
        self._follows_all = len(given) > 1 or self._book.has_names
        self._has_served = False
        self._per_endpoint = per_endpoint
        self._dialer = dialer
        self._connect = connect
        self._follow = follow
        self._channels: weakref.WeakSet[Any] = weakref.WeakSet()
        self._firsts = itertools.count()
        self._credentials = dialer.credentials
        self._lock = threading.Lock()
        self._endpoints = [self._dial(target) for target in self._book.addresses]

    def _dial(self, target: str) -> _Endpoint:
        endpoint = _Endpoint(target, self._follow(self._dialer, target) if self._follows_all else None)
        if endpoint.activity is not None:
            self._channels.add(endpoint.activity.channel)
        endpoint.stubs = itertools.cycle([self._stub(endpoint) for _ in range(self._per_endpoint)])
        return endpoint

    def _stub(self, endpoint: _Endpoint) -> Stub:
        channel: Any = self._connect(endpoint.target)
        self._channels.add(channel)
        stub: Stub = rpc.GenerationServiceStub(channel)
        stub.channel, stub.endpoint = channel, endpoint
        return stub

    def _now(self) -> list[_Endpoint]:
        """All of them, dialled anew as far as they or the credentials have changed."""
        credentials, addresses = self._dialer.credentials, self._book.addresses
        with self._lock:
            kept = {one.target: one for one in self._endpoints} if credentials is self._credentials else {}
            if kept.keys() != set(addresses):
                gone = [one for one in self._endpoints if kept.get(one.target) is None or one.target not in addresses]
                self._credentials = credentials
                self._endpoints = [kept.get(target) or self._dial(target) for target in addresses]
                for endpoint in gone:
                    if endpoint.activity is not None:
                        endpoint.activity.drop()
            return self._endpoints

    def failed(self, stub: Stub, error: TandemError) -> None:
        """A call of the stub has ended so. A standby is none that fails."""
        if isinstance(error, Unavailable) and not isinstance(error, Standby):
            stub.endpoint.failed_at = time.monotonic()
            self._book.look_again()

    def served(self) -> None:
        """A call has got something."""
        self._has_served = True

    @property
    def come_back(self) -> bool:
        """Whether servers that can't be reached are replaced by others: behind a name that has served they come and go,
        and its addresses may be told late; of several endpoints one takes another's place within seconds."""
        return self._has_served and self._follows_all

    @property
    def endpoints(self) -> int:
        """How many there are."""
        return len(self._endpoints)

    @property
    def security(self) -> ClientSecurity:
        """As it was given."""
        return self._dialer.security

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
            yield next(self._order(turn)[0].stubs)

    def each(self) -> Iterator[Stub]:
        """One stub of every endpoint, the active ones first."""
        return (next(endpoint.stubs) for endpoint in self._order(next(self._firsts)))

    def _order(self, turn: int) -> list[_Endpoint]:
        """All endpoints, in turn, the active ones first."""
        endpoints = self._now()
        first = turn % len(endpoints)
        return sorted(endpoints[first:] + endpoints[:first], key=lambda one: one.is_preferred, reverse=True)


def for_names(security: ClientSecurity, endpoints: str | Sequence[str]) -> ClientSecurity:
    """Certificates are for the name that was given, not for its addresses; of several names, for the first one."""
    given = [endpoints] if isinstance(endpoints, str) else endpoints
    return named(security, next(filter(is_name, given), ""))


def error_of(error: Any, security: ClientSecurity) -> TandemError:
    """The server's error; also what gRPC itself reports to a client of such security, as the kind of its status code.

    A call that neither its caller nor an Abort has ended is Unavailable: its server stops.
    """
    trailers = dict(error.trailing_metadata() or ())
    details = explained(error.details() or "", security)
    if ACTIVE_ENDPOINT in trailers:
        return Standby(details, trailers[ACTIVE_ENDPOINT])
    if error.code() is StatusCode.UNIMPLEMENTED:
        return RequestFailed(f"this is no scheduler of Tandem: give the address of one, not of a worker ({details})")
    if error.code() is StatusCode.INTERNAL and details == _UNDECODABLE:
        return RequestFailed(f"the server {UNDECODABLE}")
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
        """Whether no other endpoint needs to be asked. None: what came can't be decoded. Raises RequestFailed then."""
        if answer is None:
            raise RequestFailed(f"the server {UNDECODABLE}")
        self._answer = answer
        return self._good_enough(answer)

    def failed(self, error: TandemError) -> None:
        """Raises what no other endpoint would judge differently."""
        if not isinstance(error, Unavailable):
            raise error from None
        self._unavailable = error

    def answer(self) -> Any:
        """The last one. Raises Unavailable where there was none."""
        if self._answer is None:
            assert self._unavailable is not None, "every endpoint was asked"
            raise self._unavailable
        return self._answer
