"""What a person touches: the client library (here), the command line, the tiny models."""

from shared.errors import (
    Aborted,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    LimitExceeded,
    PermissionDenied,
    QueueFull,
    RequestFailed,
    TandemError,
    Unauthenticated,
    Unavailable,
)
from shared.security import ClientSecurity
from tandem.async_client import AsyncClient
from tandem.chat_output import ChatOutput, ToolCall, parse_chat_output
from tandem.client import Client
from tandem.streams import AsyncGenerationStream, GenerationStream
from tandem.token_values import EchoedPrompt, TokenLogprob
from tandem.values import (
    ChatMessage,
    Completion,
    Delta,
    Finish,
    Load,
    ModelInfo,
    RequestStats,
    Sample,
    Stats,
    Usage,
    WorkerLoad,
)

__all__ = [
    "Aborted",
    "AsyncClient",
    "AsyncGenerationStream",
    "ChatMessage",
    "ChatOutput",
    "Client",
    "ClientSecurity",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "DuplicateRequest",
    "EchoedPrompt",
    "Finish",
    "GenerationStream",
    "InvalidRequest",
    "LimitExceeded",
    "Load",
    "ModelInfo",
    "PermissionDenied",
    "QueueFull",
    "RequestFailed",
    "RequestStats",
    "Sample",
    "Stats",
    "TandemError",
    "TokenLogprob",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "WorkerLoad",
    "parse_chat_output",
]
