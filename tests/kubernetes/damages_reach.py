"""Damage to who reaches whom, which the rules of rules_services and rules_network see."""

from tests.kubernetes.damage import Damage, admit, drop, flag, one, port, spec

DAMAGES = (
    Damage(
        "services_reach_ports",
        "selects no pod",
        lambda things: spec(things, "Service", "tandem")["selector"].update(x="y"),
    ),
    Damage("services_reach_ports", "has no port http", port("tandem", targetPort="http")),
    Damage(
        "services_reach_ports",
        "port 50051 has no name",
        lambda things: spec(things, "Service", "tandem")["ports"][0].pop("name"),
    ),
    Damage(
        "services_tell_how_they_are_spoken_to",
        "its pods speak TLS",
        port("tandem", appProtocol="kubernetes.io/h2c"),
        "cpu-demo+mtls",
    ),
    Damage("headless_ports_are_the_containers", "port 80 is 50052", port("tandem-workers", port=80)),
    Damage(
        "names_are_headless_services",
        "no headless Service",
        flag("scheduler", "--workers=dns:///tandem-workers:50052", "--workers=dns:///tandem:50052"),
    ),
    Damage(
        "names_are_headless_services",
        "no such port",
        flag("scheduler", "--peers=dns:///tandem-schedulers:50051", "--peers=dns:///tandem-schedulers:50061"),
    ),
    Damage(
        "names_are_headless_services",
        "would not be heard",
        lambda things: spec(things, "Service", "tandem-schedulers").pop("publishNotReadyAddresses"),
    ),
    Damage(
        "scrapes_reach_metrics",
        "not that of --metrics-port",
        flag("worker", "--metrics-port=9100", "--metrics-port=9101"),
    ),
    Damage(
        "scrapes_reach_metrics",
        "has no port 9100",
        lambda things: spec(things, "PodMonitor", "tandem-worker")["podMetricsEndpoints"][0].update(port="9100"),
        "cpu-demo+monitoring",
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "Deployment tandem-scheduler does not reach StatefulSet tandem-worker at TCP 50052",
        drop("tandem-worker", "ingress"),
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "StatefulSet tandem-worker does not reach DNS at UDP 53",
        drop("tandem-default", "egress"),
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "a client reaches StatefulSet tandem-worker at TCP 50052",
        admit("tandem-worker", "ingress", ports=[{"protocol": "TCP", "port": 50052}]),
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "a pretender reaches Deployment tandem-scheduler at TCP 50051",
        admit("tandem-scheduler", "ingress", **{"from": [{"namespaceSelector": {}}]}),
    ),
    Damage(
        "policies_admit_what_is_needed_alone",
        "LeaderWorkerSet tandem-worker, node 1 does not reach LeaderWorkerSet tandem-worker, node 0 at TCP 29500",
        lambda things: things.remove(one(things, "NetworkPolicy", "tandem-worker-ranks")),
        "lws-multinode",
    ),
)
