"""Damage to what is named and what programs are told, which the rules of rules_references and rules_programs see."""

from tests.kubernetes.damage import Damage, certificate_for, container, flag, one, spec
from tests.kubernetes.pods import of_kind

DAMAGES = (
    Damage(
        "references_exist",
        "there is no ConfigMap other",
        lambda things: container(things)["envFrom"][0]["configMapRef"].update(name="other"),
    ),
    Damage(
        "references_exist",
        "there is no Secret tandem-worker-tls",
        lambda things: things.remove(one(things, "Certificate", "tandem-worker")),
        "cpu-demo+mtls",
    ),
    Damage(
        "references_exist",
        "there is no ResourceClaimTemplate",
        lambda things: things.remove(one(things, "ResourceClaimTemplate", "tandem-gpu")),
        "gpu-1+dra",
    ),
    Damage(
        "all_is_in_one_namespace",
        "Service tandem: is not",
        lambda things: one(things, "Service", "tandem")["metadata"].update(namespace="default"),
    ),
    Damage(
        "autoscalers_own_the_number",
        "each apply would undo",
        lambda things: spec(things, "StatefulSet", "tandem-worker").update(replicas=2),
        "cpu-demo+autoscale-hpa",
    ),
    Damage(
        "autoscalers_own_the_number",
        "no metric tandem_queue",
        lambda things: spec(things, "ScaledObject", "tandem-worker")["triggers"][0]["metadata"].update(
            query="sum(tandem_queue)"
        ),
        "cpu-demo+autoscale-keda",
    ),
    Damage(
        "certificates_are_for_what_is_dialled",
        "the certificate is for worker",
        certificate_for("worker"),
        "cpu-demo+mtls",
    ),
    Damage(
        "certificates_are_for_what_is_dialled",
        "one end speaks TLS",
        lambda things: container(things, "scheduler")["args"].remove("--tls-ca=/tls/ca.crt"),
        "lws-multinode+mtls",
    ),
    Damage(
        "certificates_are_for_what_is_dialled",
        "has this file",
        flag("worker", "--tls-client-ca=/tls/ca.crt", "--tls-client-ca=/tls/ca.pem"),
        "cpu-demo+mtls",
    ),
    Damage("programs_take_their_arguments", "No such option", flag("worker", "--port=50052", "--prot=50052")),
    Damage(
        "programs_take_their_arguments",
        "--frontends 0: at least 1",
        flag("scheduler", "--frontends=$(FRONTENDS)", "--frontends=0"),
    ),
    Damage(
        "programs_take_their_arguments",
        "its ranks meet at port 29500",
        lambda things: container(things)["ports"].pop(),
        "lws-multinode",
    ),
    Damage(
        "programs_take_their_arguments",
        "a variable that is not set",
        lambda things: of_kind(things, "ConfigMap")[0]["data"].pop("MODEL"),
    ),
    Damage(
        "programs_read_their_variables",
        "nothing reads the variable TANDEM_LOGLEVEL",
        lambda things: of_kind(things, "ConfigMap")[0]["data"].update(TANDEM_LOGLEVEL="INFO"),
    ),
)
