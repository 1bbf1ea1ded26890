"""A frontend's metrics: reads what its parts have counted. Counts nothing."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from scheduler_svc.frontend.core_link import CoreLink
from scheduler_svc.frontend.request_counts import RequestCounts
from shared.metrics import counter, histogram


def frontend_metrics(counts: RequestCounts, link: CoreLink) -> Iterator[Metric]:
    """All of them, as of now."""
    yield counter("tandem_requests", "Requests that ended, by how they did.", counts.finished, "finished_reason")
    yield counter("tandem_prompt_tokens", "Tokens of accepted prompts.", counts.prompt_tokens)
    yield counter("tandem_generation_tokens", "Tokens given to clients.", counts.generation_tokens)
    yield counter("tandem_resubmissions", "Sequences submitted again to a restarted core.", link.resubmissions)
    first = "From a request's arrival to its first tokens."
    yield histogram("tandem_time_to_first_token_seconds", first, counts.first_token)
    yield histogram("tandem_inter_token_latency_seconds", "Between two tokens of a sequence.", link.gaps)
    yield histogram("tandem_e2e_request_latency_seconds", "From a request's arrival to its end.", counts.end_to_end)
    yield histogram("tandem_request_queue_time_seconds", "From submission to first admission.", counts.queue)
    yield histogram("tandem_request_prompt_tokens", "Tokens of a prompt.", counts.prompt_length)
    yield histogram("tandem_request_generation_tokens", "Tokens of a sample.", counts.generation_length)
