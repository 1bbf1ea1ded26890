"""Who may talk to whom: what a server and a client are told about TLS and tokens. Settings alone; reads no file."""

import os
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from shared.errors import StartupError
from shared.settings import flag

File: TypeAlias = str | os.PathLike[str] | None
"""A file's name, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSecurity:
    """How a server shows who it is, and whom it answers. The files are read again when they change."""

    tls_cert: File = None
    """Certificate chain (PEM) of this process: it speaks TLS on its port, and nothing else."""
    tls_key: File = None
    """Private key (PEM, no passphrase) of --tls-cert."""
    tls_client_ca: File = None
    """Authorities (PEM): who connects must show a certificate that one of them signed."""
    token_file: File = None
    """Tokens that callers must show, a line each: TOKEN, or TENANT TOKEN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSecurity:
    """How a client knows its server, and shows who it is itself. The files are read again when they change."""

    tls_ca: File = None
    """Authorities (PEM) that servers' certificates are checked with: connections are TLS."""
    tls_cert: File = None
    """Certificate chain (PEM) to show to servers that ask for one."""
    tls_key: File = None
    """Private key (PEM, no passphrase) of --tls-cert."""
    tls_server_name: str | None = None
    """Name that servers' certificates must be for; unset: the one that is dialed."""
    token_file: File = None
    """File whose one line is the token to show."""

    ca_flag: ClassVar[str] = "--tls-ca"
    token_flag: ClassVar[str] = "--token-file"

    def __post_init__(self) -> None:
        """Raises StartupError for files that make no sense together."""
        require_pair(self)
        for name in ("tls_cert", "tls_server_name"):
            if getattr(self, name) is not None and self.tls_ca is None:
                raise StartupError(f"{flag(name)}: needs --tls-ca, the authorities of the server's certificate")


def check_server(security: ServerSecurity) -> None:
    """Raises StartupError for files that make no sense together."""
    require_pair(security)
    if security.tls_client_ca is not None and security.tls_cert is None:
        raise StartupError("--tls-client-ca: needs --tls-cert and --tls-key, TLS of this server")


def require_pair(security: Any) -> None:
    """Raises StartupError for a certificate without its key, or the other way."""
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if getattr(security, name) is not None and getattr(security, other) is None:
            raise StartupError(f"{flag(name)}: needs {flag(other)}")


PLAIN = ClientSecurity()
"""Plain text, no token."""
