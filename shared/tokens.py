"""Bearer tokens: which a server takes, whose they are, and which a client shows. No token is ever logged."""

import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import grpc
from grpc import aio

from shared.errors import PermissionDenied, TandemError, Unauthenticated
from shared.reloaded import Reloaded
from shared.security import ClientSecurity, File

LEAST_LENGTH = 16
"""Characters of a token: a shorter one could be guessed."""
OPEN_TO_ALL = ("/grpc.health.v1.Health/", "/tandem.v1.PeerService/")
"""Probes and peers have no tokens, and learn nothing but whether the server serves."""

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(r"[\x21-\x7e]+")
_SCHEME = "bearer "


class Caller(NamedTuple):
    """Who calls."""

    tenant: str = ""
    """Empty for the operator, who may call everything."""

    def scoped(self, name: str) -> str:
        """A name that the caller chose, as it is known to others: those of two tenants are never equal."""
        return f"{self.tenant}/{name}" if self.tenant else name


OPERATOR = Caller()
caller: ContextVar[Caller] = ContextVar("caller", default=OPERATOR)
"""Of the call that is being served. Where no tokens are asked for, everybody is the operator."""


class Tokens:
    """The tokens of a file, as it is now."""

    def __init__(self, file: File, shown_by: str = "clients: --token-file") -> None:
        """`shown_by`: how who shows none can do so, for people. Raises StartupError for a file that can't be used."""
        self._known = Reloaded({"--token-file": file}, _parse)
        self._shown_by = shown_by

    def caller(self, metadata: Iterable[tuple[str, str | bytes]]) -> Caller:
        """Whose token the call shows. Raises Unauthenticated. Takes as long for a wrong token as for a right one."""
        shown = next((value for key, value in metadata if key == "authorization"), None)
        if not isinstance(shown, str) or not shown.lower().startswith(_SCHEME):
            raise Unauthenticated(f"a token is needed: metadata `authorization: Bearer TOKEN`; {self._shown_by}")
        digest, found = _digest(shown[len(_SCHEME) :].strip()), None
        for known, caller in self._known.get().items():
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise Unauthenticated("the token is not among those of the server's --token-file")
        return found


class Authentication(aio.ServerInterceptor):
    """Lets calls with a known token through, and tells `caller` whose it is. Refuses others before it reads them."""

    def __init__(self, tokens: Tokens, operators_only: Iterable[str]) -> None:
        """`operators_only`: full names of methods that no tenant may call."""
        self._tokens = tokens
        self._operators_only = frozenset(operators_only)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Called by gRPC, in the task that serves the call."""
        method = str(handler_call_details.method)
        if not method.startswith(OPEN_TO_ALL):
            try:
                who = self._tokens.caller(handler_call_details.invocation_metadata)
                if who.tenant and method in self._operators_only:
                    raise PermissionDenied(f"{method} is the operator's: a token without a tenant is needed")
            except TandemError as error:
                return grpc.stream_stream_rpc_method_handler(_refusing(error))
            caller.set(who)
        return await continuation(handler_call_details)


def _refusing(error: TandemError) -> Any:
    async def refuse(requests: Any, context: Any) -> None:
        raise error

    return refuse


class OwnToken:
    """What a client shows."""

    def __init__(self, security: ClientSecurity) -> None:
        """Raises StartupError for a file that can't be used."""
        file = security.token_file
        self._token = None if file is None else Reloaded({security.token_flag: file}, _parse_own)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call."""
        return () if self._token is None else (("authorization", f"Bearer {self._token.get()}"),)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _parse(content: bytes) -> Mapping[bytes, Caller]:
    known: dict[bytes, Caller] = {}
    for number, line in enumerate(_text(content).splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if line != words[0] and len(words) == 1:  # where a script's variable was empty, who has half would be operator
            raise ValueError(f"line {number}: white space beside one word: is its tenant, or its token, missing?")
        *tenant, token = words
        if len(tenant) > 1 or (tenant and not _TENANT.fullmatch(tenant[0])):
            raise ValueError(f"line {number}: TOKEN or TENANT TOKEN is needed, the tenant of letters, digits, . _ -")
        _check(token, number)
        who = Caller(*tenant)
        if known.setdefault(_digest(token), who) != who:
            raise ValueError(f"line {number}: another tenant has this token")
    if not known:
        raise ValueError("has no token")
    return known


def _parse_own(content: bytes) -> str:
    words = _text(content).split()
    if len(words) != 1:
        raise ValueError("one token, and nothing else, is needed")
    _check(words[0], 1)
    return words[0]


def _text(content: bytes) -> str:
    try:
        return content.decode("ascii")
    except UnicodeDecodeError:
        raise ValueError("has characters that are not ASCII") from None


def _check(token: str, number: int) -> None:
    if len(token) < LEAST_LENGTH or not _TOKEN.fullmatch(token):
        raise ValueError(
            f"line {number}: a token has at least {LEAST_LENGTH} printable characters (openssl rand -hex 32)"
        )
