"""Authorities and certificates as files, as an operator has them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import trustme

from shared.security import ClientSecurity, ServerSecurity

NAME = "127.0.0.1"
LONG_AGO = {"not_before": datetime(2019, 1, 1, tzinfo=UTC), "not_after": datetime(2020, 1, 1, tzinfo=UTC)}


class Authority:
    """Signs certificates into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.ca = trustme.CA()
        self.folder = folder
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self.ca.cert_pem.bytes())

    def renew(self) -> None:
        """Another authority takes over: for now both count."""
        self.ca = trustme.CA()
        self.file.write_bytes(self.ca.cert_pem.bytes() + self.file.read_bytes())

    def settle(self) -> None:
        """Only the latest authority counts."""
        self.file.write_bytes(self.ca.cert_pem.bytes())

    def sign(self, name: str, *hosts: str, **validity: Any) -> tuple[Path, Path]:
        """Files `name`.pem and `name`.key for the hosts, written over those that are there: one after the other."""
        issued = self.ca.issue_cert(*(hosts or (NAME,)), **validity)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        key.write_bytes(issued.private_key_pem.bytes())
        return certificate, key


def server(authority: Authority, name: str = "server", *, mutual: bool = False, **more: Any) -> ServerSecurity:
    """A server with a certificate of its own; `mutual`: that wants one of its clients."""
    certificate, key = authority.sign(name)
    return ServerSecurity(tls_cert=certificate, tls_key=key, tls_client_ca=authority.file if mutual else None, **more)


def client(authority: Authority, name: str | None = None, **more: Any) -> ClientSecurity:
    """A client that trusts the authority; with `name`, with a certificate of its own."""
    certificate, key = authority.sign(name, "client.example") if name else (None, None)
    return ClientSecurity(tls_ca=authority.file, tls_cert=certificate, tls_key=key, **more)
