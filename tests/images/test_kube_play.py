"""The overlay cpu-demo run by podman as pods, and called as every server is: streams outlive what a rollout does."""

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.rpc import until_serving
from tandem import Client
from tests.images.playable import Pod, playable
from tests.images.workshop import Workshop, say
from tests.kubernetes.rendered import K8S, TOOLS, kustomize, objects
from tests.patience import PATIENCE_S

PROMPT, TOKENS, BEFORE = "It is a truth universally acknowledged", 600, 20
NETWORK = "tandem"
Cluster = dict[str, Pod]


@pytest.fixture(scope="module")
def cluster(images: Workshop) -> Iterator[Cluster]:
    """The overlay's pods by name, all ready."""
    if not (TOOLS / ".runs").exists():
        pytest.skip(f"no kubectl in {TOOLS}: make kube-demo")
    pods = playable(objects(kustomize(K8S / "overlays" / "cpu-demo")))
    images.podman("network", "create", NETWORK)
    try:
        for pod in pods:
            if pod.arguments[0] == "worker":
                pod.arguments.append("--dtype=float64")  # in which both workers compute the same tokens
            play(images, pod)
        for pod in pods:
            port, service = pod.readiness
            asyncio.run(asyncio.wait_for(until_serving(f"{pod.address}:{port}", service), PATIENCE_S))
        yield {pod.name: pod for pod in pods}
    finally:
        images.clean()


def play(shop: Workshop, pod: Pod) -> None:
    """Starts it. Its aliases in the network are what a headless Service is to a cluster's DNS."""
    say(f"podman kube play {pod.name}, {' and '.join(pod.services)} to others")
    path = shop.folder / f"{pod.name}.yaml"
    path.write_text(pod.text())
    shop.podman("play", "kube", "--network", f"{NETWORK}:{','.join(f'alias={name}' for name in pod.services)}", path)
    pod.address = shop.address(pod.container)


def stream(endpoint: str, *, stopping: int | None = None) -> str:
    """A whole answer. A process to stop gets SIGTERM when a part of it has come."""
    text, tokens = "", 0
    with Client(endpoint) as client:
        for delta in client.generate(PROMPT, max_tokens=TOKENS, temperature=0.0, ignore_eos=True):
            text, tokens = text + delta.text, tokens + len(delta.token_ids)
            if stopping is not None and tokens >= BEFORE:
                assert tokens < TOKENS // 2, "it does not stream"
                os.kill(stopping, signal.SIGTERM)
                stopping = None
    assert tokens == TOKENS
    return text


def metric(pod: Pod, name: str) -> float:
    """The sum of its samples of a name."""
    with urllib.request.urlopen(f"http://{pod.address}:9100/metrics", timeout=PATIENCE_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def test_pods_run_as_the_manifest_says(cluster: Cluster, images: Workshop) -> None:
    form = "{{.HostConfig.ReadonlyRootfs}} {{.Config.User}} {{.EffectiveCaps}}"
    for pod in cluster.values():
        assert images.podman("inspect", "--format", form, pod.container) == "true 10001:10001 []"


def test_it_streams_and_a_rollout_cuts_no_stream(cluster: Cluster, images: Workshop) -> None:
    scheduler, *workers = (cluster[name] for name in ("tandem-scheduler-0", "tandem-worker-0", "tandem-worker-1"))
    endpoint = f"{scheduler.address}:50051"
    command = [sys.executable, "-m", "tandem", "generate", PROMPT, "--max-tokens", "16", "--endpoint", endpoint]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    assert answer
    say(f"tandem generate '{PROMPT}': {answer}")
    undisturbed = stream(endpoint)
    idle, busy = sorted(workers, key=lambda worker: metric(worker, "tandem_worker_tokens_total"))
    for pod in (busy, scheduler):  # the prompt's prefix is cached there, so the next stream is there too
        say(f"SIGTERM to {pod.name} in the middle of a stream")
        assert stream(endpoint, stopping=images.process(pod.container)) == undisturbed
        assert images.ended(pod.container) == 0
        if pod is busy:
            assert metric(scheduler, "tandem_replays_total") == 1
    assert images.terminate(idle.container) == 0
