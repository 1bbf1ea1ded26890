"""Errors by kind: each message says what is wrong and what to do. shared.rpc maps the kinds to status codes."""


class TandemError(Exception):
    """Base of every error that a person or client is meant to read."""


class InvalidRequest(TandemError):
    """The caller's mistake: names the field and the bound."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


class Unauthenticated(TandemError):
    """The caller does not show who it is."""


class PermissionDenied(TandemError):
    """The caller is known, and this is not for it."""


class DuplicateRequest(TandemError):
    """A live request has this id."""


class QueueFull(TandemError):
    """No room to wait, or no turn in time: try again after `retry_after_ms` milliseconds."""

    def __init__(self, message: str, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class LimitExceeded(TandemError):
    """More than the service keeps or takes for one client; no retry helps."""


class Unavailable(TandemError):
    """Not served here or now: draining, no worker, or another scheduler is active."""


class Standby(Unavailable):
    """Another scheduler is the active one, or is about to be: ask again soon, best at `active`."""

    def __init__(self, message: str, active: str) -> None:
        """`active` is host:port, or empty where it is not known."""
        super().__init__(message)
        self.active = active


class DeadlineExceeded(TandemError):
    """The request's time is over."""


class Aborted(TandemError):
    """The request was ended by its id."""


class LeaseHeld(TandemError):
    """Another scheduler holds the worker: retry later."""


class NotReplayable(TandemError):
    """What the caller wants to go on from is not kept: it starts over."""


class RequestFailed(TandemError):
    """A fault of the service that ends one request alone."""


class ProtocolError(TandemError):
    """A peer sends what is no message, or breaks the plan log's rules: its stream can't go on."""


class StartupError(TandemError):
    """A program can't start; the message is one line that says what to do. Exit status: process.STARTUP_FAILED."""
