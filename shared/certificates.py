"""Until when certificates count: told in the log once they do no more, and to metrics. Reads files, dials nobody."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.core import Metric

from shared.metrics import gauge
from shared.settings import flag

LOOK_S = 60.0
"""Between two looks at the files."""
OWN = "tls_cert"
FILES = (OWN, "tls_client_ca", "tls_ca", "peer_tls_ca")

_log = structlog.get_logger(__name__)


class Certificates:
    """The certificates in a process's files, of its own and of authorities, as they are now."""

    def __init__(self, settings: Any) -> None:
        """`settings`: those of a server, which may dial others too."""
        files = {flag(name): getattr(settings, name, None) for name in FILES}
        self._paths = {name: Path(file) for name, file in files.items() if file is not None}
        self._told: dict[str, datetime] = {}

    def ends(self) -> dict[str, datetime]:
        """By flag, the end of its own certificate, or of the authority that lasts longest. What can't be read is left
        out: whoever uses the file says so."""
        found = {name: _end(path, own=name == flag(OWN)) for name, path in self._paths.items()}
        return {name: end for name, end in found.items() if end is not None}

    def metrics(self) -> Iterator[Metric]:
        """For an exporter."""
        if self._paths:
            ends = {name: end.timestamp() for name, end in self.ends().items()}
            text = "When the certificate expires, of authorities the last one, as a Unix time."
            yield gauge("tandem_tls_certificate_expiry_timestamp_seconds", text, ends, "flag")

    async def watch(self) -> None:
        """Warns, once, of each that has expired, for ever."""
        while self._paths:
            self.warn(datetime.now(UTC))
            await asyncio.sleep(LOOK_S)

    def warn(self, now: datetime) -> None:
        """Of those that have expired since the last time."""
        for name, end in self.ends().items():
            if end <= now and self._told.get(name) != end:
                self._told[name] = end
                _log.warning(
                    "a certificate has expired: new connections fail until the file holds one that counts",
                    file=f"{name} {self._paths[name]}",
                    expired=f"{end:%Y-%m-%d %H:%M} UTC",
                )


def _end(path: Path, *, own: bool) -> datetime | None:
    from cryptography import x509  # 40 ms, where there is TLS

    try:
        chain = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return None
    return chain[0].not_valid_after_utc if own else max(each.not_valid_after_utc for each in chain)
