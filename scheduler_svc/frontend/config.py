"""What one frontend process is told at its start."""

from dataclasses import dataclass
from pathlib import Path

from shared.security import ServerSecurity


@dataclass(frozen=True, slots=True)
class FrontendConfig(ServerSecurity):
    """Settings of one frontend; travels to its process as JSON."""

    model: Path
    """Model folder: configuration, tokenizer, chat template. Weights are not read."""
    core_socket: Path
    """Unix socket that the core listens on."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """Port that all frontends share; 0 means any free one. The parent checks that nobody else has it."""
    health_port: int | None = None
    """Port with nothing but the health service, in plain text, shared too; None: there is none."""
    health_socket: Path | None = None
    """Unix socket with the same for this frontend alone, where the parent asks; None: nobody does."""
    model_name: str | None = None
    """Name told to clients; None means the model folder's."""
    use_generation_config: bool = True
    """The model's generation_config.json answers where a request is silent about sampling."""
    max_prompt_bytes: int = 4 << 20
    """Longest text to tokenize, UTF-8, also as the chat template renders it."""
    template_timeout: float = 2.0
    """Seconds that rendering the chat template may take."""
    tokenizer_threads: int = 2
    """Threads that tokenize: a long prompt must not hold up a short one."""
    grammar_timeout: float = 5.0
    """Seconds that compiling a request's grammar may take."""
    core_timeout: float = 30.0
    """Seconds that requests wait for a core that is away; then they end UNAVAILABLE."""
    hands_off: bool = False
    """After SIGTERM running streams end at once, to be resumed at another scheduler."""
    drain_timeout: float = 30.0
    """Seconds that running streams have to finish after SIGTERM."""
    max_connections: int | None = None
    """Most connections to each port; None: as many as the process may open files, but for some that it needs itself."""
    read_timeout: float = 60.0
    """Seconds that a client may leave a message of its stream untaken; then the stream ends."""
    fair_by: str | None = None
    """By what clients are told apart that take turns: peer, token or a metadata key; None: by nothing."""
    metrics_socket: Path | None = None
    """Unix socket where the parent takes metrics; None: nobody wants them."""
    otlp_endpoint: str | None = None
    """Where traces go, a URL; None: nowhere."""
    max_connection_age: float = 600.0
    """Seconds after which a client is asked to connect anew, so that connections spread over frontends again.
    Streams that run stay."""
