"""The core's failures as errors by kind: the inverse of what the core did to send them."""

from shared.errors import InvalidRequest, QueueFull, RequestFailed, TandemError
from shared.pb import core_pb2
from shared.rpc import STATUS_CODES

_KINDS = {code.value[0]: kind for kind, code in STATUS_CODES.items()}


def error_from(failure: core_pb2.Failure) -> TandemError:
    """The error that the core reported; a code that no kind has counts as a fault of the service."""
    kind = _KINDS.get(failure.code, RequestFailed)
    if kind is InvalidRequest:
        field, _, problem = failure.message.partition(": ")
        return InvalidRequest(field, problem)
    if kind is QueueFull:
        return QueueFull(failure.message, failure.retry_after_ms)
    return kind(failure.message)
