"""What an operator decides about a scheduler."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from shared.errors import StartupError
from shared.resolve import check_targets
from shared.security import ClientSecurity, File, ServerSecurity, check_server
from shared.settings import check_bounds, check_distinct, flag
from shared.types import DEPTH_LIMIT

FINISH, HANDOFF = DRAINS = ("finish", "handoff")
METADATA_KEY = re.compile("[0-9a-z_.-]+")


class WorkerSecurity(ClientSecurity):
    """How workers are known: the token is another one than clients'."""

    token_flag: ClassVar[str] = "--worker-token-file"


class PeerSecurity(ClientSecurity):
    """How peers are known: their authorities are others than workers'."""

    ca_flag: ClassVar[str] = "--peer-tls-ca"


@dataclass(frozen=True, slots=True)
class SchedulerConfig(ServerSecurity):
    """Settings of one scheduler: its frontends and its core. Raises StartupError for a value out of range."""

    model: Path
    """Model folder: configuration, tokenizer and chat template. The weights are the workers' matter."""
    workers: tuple[str, ...]
    """Worker groups, each as host:port; or dns:///name:port, where each address that the name has, now or later, is
    one: a headless Service of Kubernetes."""
    model_name: str | None = None
    """Name told to clients; None means the folder's name."""
    host: str = "127.0.0.1"
    """Address that clients reach."""
    port: int = 50051
    """Port that clients reach, shared by all frontends."""
    health_port: int | None = None
    """Port with nothing but the health service, in plain text, for probes that speak no TLS; None: there is none."""
    tls_ca: File = None
    """Authorities (PEM) that workers' certificates are checked with: connections to workers are TLS, and show
    --tls-cert."""
    tls_server_name: str | None = None
    """Name that workers' certificates must be for; None: the one that is dialed."""
    worker_token_file: File = None
    """File whose one line is the token to show to workers."""
    frontends: int = 1
    """Frontend processes."""
    max_num_seqs: int | None = None
    """Most running sequences per worker group; None means what the workers hold."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step; None means what the workers take."""
    max_queue: int = 4096
    """Most waiting sequences; beyond it RESOURCE_EXHAUSTED."""
    max_queue_tokens: int = 1 << 24
    """Most tokens of waiting sequences; beyond it RESOURCE_EXHAUSTED, unless nobody waits."""
    max_queue_time: float | None = None
    """Seconds that a request may wait for its first step; then it ends RESOURCE_EXHAUSTED. None: no bound."""
    read_timeout: float = 60.0
    """Seconds that a client may leave a message of its stream untaken; then the stream ends RESOURCE_EXHAUSTED."""
    fair_by: str | None = None
    """Clients take turns, told apart by: peer (their address), token (their authorization metadata) or the metadata
    key of that name. None: first come, first served."""
    depth: int | None = None
    """Plans of one group without a result, 1 to 4; None picks 2 to 4 from the measured round trip and step time."""
    step_timeout: float = 10.0
    """Seconds without a result, with a plan out, after which a worker group counts as lost; at least 1, because an
    idle group is asked twice a second. The core and the frontends have as long to turn before they are killed and
    started again."""
    worker_loss_timeout: float = 60.0
    """Seconds without any worker group after which waiting requests end UNAVAILABLE; also those that wait for one group
    because they fit no other one."""
    resolve_interval: float = 5.0
    """Seconds between two looks at the addresses of the workers' names."""
    grammar_timeout: float = 5.0
    """Seconds that compiling a request's grammar may take; then the request is refused."""
    peers: tuple[str, ...] = ()
    """Schedulers before the same workers, of which one serves at a time: each as host:port, or dns:///name:port; this
    one may be among them."""
    peer_timeout: float = 2.0
    """Seconds of silence after which a peer counts as dead, and in which an own core process that does not turn is
    killed, if there are peers; at least 1, because a scheduler speaks twice a second."""
    peer_tls_ca: File = None
    """Authorities (PEM) that peers' certificates are checked with: connections to peers are TLS, with --tls-cert."""
    drain: str = "finish"
    """What happens to running streams after SIGTERM: finish (within the drain timeout), or handoff (they end
    UNAVAILABLE at once, and Tandem's client resumes them at a peer)."""
    drain_timeout: float = 30.0
    """Seconds that running streams have to finish after SIGTERM."""
    metrics_port: int | None = None
    """Port of Prometheus metrics over HTTP, on the same host; None: there are none."""
    otlp_endpoint: str | None = None
    """Where traces go: an OpenTelemetry collector that takes OTLP over gRPC, http://host:port or https://host:port.
    None: nowhere. Needs the extra tandem-serve[otel]."""
    generation_config: bool = True
    """Whether the model's generation_config.json answers where a request is silent about sampling."""

    def __post_init__(self) -> None:
        """Every value on its own; what depends on the workers is checked when they are known."""
        ports = ("port", "health_port", "metrics_port")
        check_bounds(self, ports, 1, 65535)
        check_distinct({flag(name): getattr(self, name) for name in ports})
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise StartupError(
                f"--otlp-endpoint {self.otlp_endpoint!r}: http://host:port or https://host:port is needed"
            )
        check_bounds(self, ("frontends", "max_num_seqs", "max_num_batched_tokens"), 1)
        check_bounds(self, ("max_queue", "max_queue_tokens"), 1)
        check_bounds(self, ("max_queue_time",), 0.1)
        check_bounds(self, ("depth",), 1, DEPTH_LIMIT)
        check_bounds(self, ("step_timeout", "read_timeout"), 1)
        check_bounds(self, ("worker_loss_timeout", "drain_timeout"), 0)
        check_bounds(self, ("grammar_timeout",), 0.1)
        if self.fair_by is not None and not METADATA_KEY.fullmatch(self.fair_by):
            raise StartupError(f"--fair-by {self.fair_by!r}: peer, token or a metadata key, in lower case, is needed")
        if not self.workers:
            raise StartupError("--workers: at least one host:port or dns:///name:port is needed")
        check_targets("--workers", self.workers)
        check_targets("--peers", self.peers)
        check_bounds(self, ("resolve_interval",), 0.1)
        check_bounds(self, ("peer_timeout",), 1)
        if self.drain not in DRAINS:
            raise StartupError(f"--drain {self.drain!r}: not among {', '.join(DRAINS)}")
        if self.drain == HANDOFF and not self.peers:
            raise StartupError(f"--drain {HANDOFF}: there is nobody to take over: --peers is needed")
        check_server(self)

    @property
    def worker_security(self) -> ClientSecurity:
        """How workers are known, and how this scheduler shows who it is: with the certificate that its clients see.

        Raises StartupError for files that make no sense together.
        """
        dialed = self.tls_ca is not None
        return WorkerSecurity(
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert if dialed else None,
            tls_key=self.tls_key if dialed else None,
            tls_server_name=self.tls_server_name,
            token_file=self.worker_token_file,
        )

    @property
    def peer_security(self) -> ClientSecurity:
        """The same for peers, which ask for no token. Raises StartupError for files that make no sense together."""
        dialed = self.peer_tls_ca is not None
        return PeerSecurity(
            tls_ca=self.peer_tls_ca,
            tls_cert=self.tls_cert if dialed else None,
            tls_key=self.tls_key if dialed else None,
        )
