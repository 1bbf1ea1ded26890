"""What frontends are told of the core, as their message. Knows no socket and decides nothing."""

from collections.abc import Mapping
from dataclasses import replace

from scheduler_svc.core import Counters, GroupLoad, Load
from scheduler_svc.election import Election
from scheduler_svc.peers import claim_to_pb
from scheduler_svc.served_core import ServedCore
from scheduler_svc.worker_client import WorkerLink
from shared.pb import core_pb2


def load_of(served: ServedCore, early: int) -> Load:
    """How busy the service is, `early` being how many wait for the first worker."""
    if served.core is None:
        return Load(early, {}, Counters())
    load = served.core.load()
    return replace(load, queued=load.queued + early)


def core_state(
    election: Election, load: Load, links: Mapping[int, WorkerLink], served: ServedCore, *, progressing: bool
) -> core_pb2.CoreState:
    """`progressing`: nothing waits in vain."""
    state = core_pb2.CoreState(active=election.serves, standby=not election.accepts, progressing=progressing)
    state.peer.CopyFrom(claim_to_pb(election.claim))
    state.active_endpoint = election.leader()
    state.queued = load.queued
    state.running = sum(group.running for group in load.groups.values())
    for link in links.values():
        group = load.groups.get(link.group, GroupLoad())
        values = {name: getattr(group, name) for name in GroupLoad.__dataclass_fields__}
        state.groups.add(
            endpoint=link.endpoint,
            connected=link.is_connected,
            refused=link.is_refused,
            problem=link.problem,
            **values,
        )
    if served.core is not None and served.worker is not None:
        state.max_running = served.core.config.max_num_seqs * sum(not link.is_refused for link in links.values())
        state.model.dtype = served.worker.dtype
        state.model.context_limit = served.core.context_limit
        state.model.vocabulary_size = served.worker.vocabulary_size
        state.model.eos_token_ids.extend(served.worker.eos_token_ids)
        state.model.block_size = served.worker.block_size
    return state
