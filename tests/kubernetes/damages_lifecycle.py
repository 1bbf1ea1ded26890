"""Damage to how pods begin and end, which the rules of rules_lifecycle see."""

from tests.kubernetes.damage import Damage, container, flag, one, pod, probe, spec

DAMAGES = (
    Damage(
        "graces_cover_drains",
        "preStop sleeps 90 s of a grace of 90 s",
        lambda things: container(things, "scheduler")["lifecycle"]["preStop"]["sleep"].update(seconds=90),
    ),
    Damage(
        "graces_cover_drains",
        "may take 95 s",
        flag("scheduler", "--drain-timeout=60", "--drain-timeout=80"),
    ),
    Damage(
        "workers_outlast_schedulers",
        "drains for less than the 65 s",
        flag("worker", "--drain-timeout=70", "--drain-timeout=60"),
    ),
    Damage(
        "workers_outlast_schedulers",
        "is killed before",
        lambda things: pod(things).update(terminationGracePeriodSeconds=60),
        "lws-multinode",
    ),
    Damage("probes_ask_the_health_port", "a number from 1 to 65535", probe("livenessProbe", port=70000)),
    Damage("probes_ask_the_health_port", "a number from 1 to 65535", probe("readinessProbe", port="health")),
    Damage("probes_ask_the_health_port", "health is at 50062", probe("readinessProbe", port=50052)),
    Damage("probes_ask_the_health_port", "asks for 'ready'", probe("readinessProbe", service="ready")),
    Damage("probes_ask_the_health_port", "no livenessProbe", lambda things: container(things).pop("livenessProbe")),
    Damage(
        "rollouts_keep_serving",
        "no successor",
        lambda things: spec(things, "Deployment", "tandem-scheduler")["strategy"].update(
            rollingUpdate={"maxSurge": 0, "maxUnavailable": 1}
        ),
    ),
    Damage(
        "rollouts_keep_serving",
        "the ranks of a group would never meet again",
        lambda things: spec(things, "LeaderWorkerSet", "tandem-worker")["leaderWorkerTemplate"].update(
            restartPolicy="None"
        ),
        "lws-multinode",
    ),
    Damage(
        "budgets_let_nodes_drain",
        "may block a drain",
        lambda things: spec(things, "PodDisruptionBudget", "tandem-worker").update(maxUnavailable=0),
    ),
    Damage(
        "budgets_let_nodes_drain",
        "never gets ready",
        lambda things: spec(things, "PodDisruptionBudget", "tandem-worker").pop("unhealthyPodEvictionPolicy"),
    ),
    Damage(
        "budgets_let_nodes_drain",
        "exactly one budget",
        lambda things: things.remove(one(things, "PodDisruptionBudget", "tandem-scheduler")),
    ),
)
