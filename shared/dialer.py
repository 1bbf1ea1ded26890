"""How a client connects: its channels' credentials and its calls' token, as its files say now."""

from collections.abc import Sequence

import grpc
from grpc import aio

from shared.rpc import CHANNEL_OPTIONS
from shared.security import ClientSecurity
from shared.tls import channel_credentials
from shared.tokens import OwnToken


class Dialer:
    """Makes channels, for threads or for asyncio. Safe to share between threads."""

    def __init__(self, security: ClientSecurity, *, as_child: bool = False) -> None:
        """Raises StartupError for files that can't be used; `as_child`: see shared.tls.server_credentials."""
        self.security = security
        self._credentials = channel_credentials(security, as_child=as_child)
        self._token = OwnToken(security)
        name = security.tls_server_name
        self._options: Sequence[tuple[str, int | str]] = [
            *CHANNEL_OPTIONS,
            *([("grpc.ssl_target_name_override", name)] if name is not None else []),
        ]

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """The same object as long as the files say the same: with another one, channels must be made anew."""
        return None if self._credentials is None else self._credentials.get()

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of each call: the token, if there is one."""
        return self._token.metadata

    def channel(self, target: str, more: Sequence[tuple[str, int | str]] = ()) -> aio.Channel:
        """For asyncio, with `more` options."""
        credentials, options = self.credentials, [*self._options, *more]
        if credentials is None:
            return aio.insecure_channel(target, options=options)
        return aio.secure_channel(target, credentials, options=options)

    def thread_channel(self, target: str) -> grpc.Channel:
        """For threads."""
        credentials = self.credentials
        if credentials is None:
            return grpc.insecure_channel(target, options=self._options)
        return grpc.secure_channel(target, credentials, options=self._options)
