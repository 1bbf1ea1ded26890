"""gRPC's credentials from PEM files, for both ends of every connection. Knows no service."""

import os
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc

from shared.reloaded import Reloaded
from shared.security import ClientSecurity, File, ServerSecurity
from shared.settings import flag

_FAILED = "failed to connect"
_HINTS = (
    ("certificate has expired", "the server's certificate has expired, or its authority in {ca}"),
    ("certificate is not yet valid", "the server's certificate is not valid yet: compare the clocks"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not signed by an authority of {ca}"),
    (
        "Hostname Verification",
        "the server's certificate is for another name: dial that one, or give it as --tls-server-name",
    ),
    ("WRONG_VERSION_NUMBER", "the server speaks plain text: leave {ca} out"),
)
"""What gRPC reports of a handshake, and what a person can do about it; the first one counts."""
_CLOSED = "Socket closed"
"""All that gRPC reports where the server ends the handshake, or the connection before there is one."""
HANDSHAKES_BEGIN_S = 0.1
"""Seconds until every handshake has taken what it needs of the certificates that counted when it began."""


def server_credentials(security: ServerSecurity, *, as_child: bool = False) -> grpc.ServerCredentials | None:
    """For one port. Files are looked at for every handshake, so that new certificates and authorities count from the
    next one on.

    None for plain text. Raises StartupError for files that can't be used. `as_child`: the parent of this process has
    started with them, so that one which takes the place of another takes what has expired meanwhile, too: with
    nobody in its place the other files, and the streams that run, would be of no use either.
    """
    if security.tls_cert is None:
        return None
    first = partial(_server_configuration, dated=not as_child)
    files = Reloaded(_flags(security, "tls_cert", "tls_key", "tls_client_ca"), _server_configuration, first)
    ask: Any = _changed(files)  # gRPC's stubs leave None out
    return grpc.dynamic_ssl_server_credentials(files.get(), ask, security.tls_client_ca is not None)


def _changed(
    files: Reloaded[grpc.ServerCertificateConfiguration],
) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """What gRPC asks before each handshake, one at a time: None while nothing changes.

    gRPC takes whatever it is given for new, and then frees what it had, while a handshake that asked just before may
    be about to use that: it fails, or the process ends. So it is given only what is new, when such a one is through.
    """
    known = files.get()

    def ask() -> grpc.ServerCertificateConfiguration | None:
        nonlocal known
        current = files.get()
        if current is known:
            return None
        known = current
        time.sleep(HANDSHAKES_BEGIN_S)
        return current

    return ask


def channel_credentials(
    security: ClientSecurity, *, as_child: bool = False
) -> Reloaded[grpc.ChannelCredentials] | None:
    """A channel keeps those that it was made with: new ones need a new channel.

    None for plain text. Raises StartupError for files that can't be used. `as_child`: see server_credentials.
    """
    if security.tls_ca is None:
        return None
    files = {security.ca_flag: security.tls_ca, **_flags(security, "tls_cert", "tls_key")}
    return Reloaded(files, _channel_credentials, partial(_channel_credentials, dated=not as_child))


def explained(details: str, security: ClientSecurity) -> str:
    """What gRPC says of a failed call of such a client, in words that say what to do where TLS is why."""
    if not details.startswith(_FAILED):
        return details
    hint = next((hint.format(ca=security.ca_flag) for found, hint in _HINTS if found in details), None)
    if hint is None and _CLOSED in details:
        hint = _why_closed(security)
    return details if hint is None else f"{hint} ({details})"


def _why_closed(security: ClientSecurity) -> str:
    if security.tls_ca is None:
        return f"the server closed the connection: it ends, or speaks TLS ({security.ca_flag})"
    if security.tls_cert is None:
        return "the server closed the connection: does it want a certificate (--tls-cert, --tls-key)?"
    return "the server closed the connection: does its --tls-client-ca accept the certificate of --tls-cert?"


def _flags(security: ServerSecurity | ClientSecurity, *names: str) -> dict[str, File]:
    return {flag(name): getattr(security, name) for name in names}


def _server_configuration(
    certificate: bytes, key: bytes, client_ca: bytes | None, *, dated: bool = True
) -> grpc.ServerCertificateConfiguration:
    _check_pair(certificate, key, dated)
    if client_ca is not None:
        _check_authorities(client_ca)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca)


def _channel_credentials(
    ca: bytes, certificate: bytes | None, key: bytes | None, *, dated: bool = True
) -> grpc.ChannelCredentials:
    _check_authorities(ca)
    if certificate is not None and key is not None:
        _check_pair(certificate, key, dated)
    return grpc.ssl_channel_credentials(ca, key, certificate)


def _check_pair(certificate: bytes, key: bytes, dated: bool) -> None:
    """gRPC would tell of a bad pair only in handshakes. OpenSSL reads files alone; this one is in memory."""
    handle = os.memfd_create("tls")
    try:
        os.write(handle, b"\n".join((key, certificate)))
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(f"/proc/self/fd/{handle}", password=_no_passphrase)
    except ssl.SSLError as error:
        raise ValueError(f"no certificate and private key in PEM that belong together ({error.reason})") from None
    finally:
        os.close(handle)
    if dated:
        _check_dates(certificate)


def _check_dates(chain: bytes) -> None:
    """OpenSSL leaves these to whoever is shown the certificate. Of its own alone: authorities renew theirs."""
    from cryptography import x509  # 40 ms, where there is TLS

    certificate, now = x509.load_pem_x509_certificate(chain), datetime.now(UTC)
    if now > certificate.not_valid_after_utc:
        raise ValueError(f"the certificate has expired, {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC")
    if now < certificate.not_valid_before_utc:
        raise ValueError(f"the certificate is not valid before {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC")


def _no_passphrase() -> str:
    raise ValueError("the private key is encrypted: store it without a passphrase, readable to the server alone")


def _check_authorities(pem: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError):
        raise ValueError("no certificates of authorities in PEM") from None
