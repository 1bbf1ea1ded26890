"""Faults of the network and rolling restarts amid streams: `unshare --net python -m tests.net FOLDER`.

Prints a table of what each fault cost, and as the last line the same as JSON. Any stream that is not that of the
undisturbed run, and any that ends with an error, is among `wrong`.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import gt
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.net.cluster import Client, Cluster, running, until

DOWN_S = 0.5
"""That a link stays down after its loss was noticed."""
SHORT_S = 3.0
"""That the client's link is down: shorter than either side would wait for the other."""


@dataclass
class Fault:
    """What happened, from its begin until all was well again, by the monotonic clock."""

    name: str
    began: float
    noticed_s: float | None
    ended: float = 0.0


def cut_worker(cluster: Cluster, name: str, *, sent: bool, received: bool) -> Fault:
    """A black hole between the schedulers and a worker."""
    link = cluster.hosts["worker"].link
    link.cut(sent=sent, received=received)
    fault = noticed(name, lambda: "worker" not in cluster.connected("scheduler-0"))
    time.sleep(DOWN_S)
    link.heal()
    return fault


def reset_worker(cluster: Cluster) -> Fault:
    """A firewall resets all its connections."""
    link = cluster.hosts["worker"].link
    link.sent.refuses = link.received.refuses = True
    fault = noticed("connections of a worker are reset", lambda: "worker" not in cluster.connected("scheduler-0"))
    link.heal()
    return fault


def cut_client(cluster: Cluster) -> Fault:
    """Nobody gives it up."""
    fault = Fault(f"the client's link is down for {SHORT_S:g} s", time.monotonic(), None)
    cluster.hosts["client"].link.cut()
    time.sleep(SHORT_S)
    cluster.hosts["client"].link.heal()
    return fault


def cut_node(cluster: Cluster) -> Fault:
    """The second node of a group is cut off from all: both nodes end, and are started again."""
    nodes = [cluster.pods[f"node-{rank}"] for rank in range(2)]
    before = [len(node.statuses) for node in nodes]
    cluster.hosts["node-1"].link.cut()
    fault = noticed(
        "the second node of a group is cut off", lambda: all(map(gt, [len(node.statuses) for node in nodes], before))
    )
    time.sleep(DOWN_S)
    cluster.hosts["node-1"].link.heal()
    return fault


def restart_workers(cluster: Cluster) -> Fault:
    """One group after the other, each when the one before serves again."""
    fault = Fault("rolling restart of the workers", time.monotonic(), None)
    for names in (["worker"], ["node-0", "node-1"]):
        cluster.restart(*names)
        cluster.until_connected("scheduler-0")
    return fault


def replace_scheduler(cluster: Cluster) -> Fault:
    """As a Deployment with maxSurge 1: the new one is ready before the old one is told to stop."""
    cluster.start_scheduler("scheduler-1", "scheduler-0", "scheduler-1")
    fault = Fault("rolling update of the scheduler", time.monotonic(), None)
    old = cluster.pods["scheduler-0"]
    old.let_end()
    old.main().terminate()
    until(lambda: "worker" in cluster.connected("scheduler-1"), "the new scheduler serves")
    fault.noticed_s = time.monotonic() - fault.began
    cluster.tell("schedulers", "scheduler-1")
    assert old.until_ended() == 0, old.log.read_text()
    return fault


def noticed(name: str, condition: Callable[[], bool]) -> Fault:
    """Waits for that; how long it took."""
    began = time.monotonic()
    until(condition, name)
    return Fault(name, began, time.monotonic() - began)


def happen(cluster: Cluster, client: Client) -> list[Fault]:
    """All, one after the other; each ends when both workers have work again, and every stream has moved."""
    steps: list[Callable[[], Fault]] = [
        lambda: cut_worker(cluster, "black hole, both ways", sent=True, received=True),
        lambda: cut_worker(cluster, "black hole, to a worker", sent=False, received=True),
        lambda: cut_worker(cluster, "black hole, from a worker", sent=True, received=False),
        lambda: reset_worker(cluster),
        lambda: cut_client(cluster),
        lambda: cut_node(cluster),
        lambda: restart_workers(cluster),
        lambda: replace_scheduler(cluster),
    ]
    faults = []
    cluster.until_busy("scheduler-0")
    for step in steps:
        faults.append(step())
        cluster.until_busy("scheduler-1" if step is steps[-1] else "scheduler-0")
        client.until_moving()
        faults[-1].ended = time.monotonic()
    return faults


def main(folder: Path) -> None:
    """Prints table and JSON."""
    with running(folder) as cluster:
        client = Client(cluster)
        faults = happen(cluster, client)
        seen = client.end()
    table = Table(title="a fault, in seconds until it was noticed, and the longest pause of a stream that met it")
    for column in ("fault", "noticed in", "longest pause"):
        table.add_column(column)
    for fault in faults:
        met = [end - begin for begin, end in seen["pauses"] if fault.began < end < fault.ended]
        noticed_in = "" if fault.noticed_s is None else f"{fault.noticed_s:.2f}"
        table.add_row(fault.name, noticed_in, f"{max(met, default=0.0):.2f}")
    Console(width=100).print(table)
    print(json.dumps({"faults": len(faults), "requests": seen["requests"], "wrong": seen["wrong"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
