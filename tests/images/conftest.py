"""Both images, built; or the reason why they can't be."""

from collections.abc import Iterator

import pytest

from tests.images.build import BASE, SCHEDULER, TORCH, WORKER, build, make_base
from tests.images.workshop import FOLDER, Workshop, WorkshopError, install_packages, say, why_not


@pytest.fixture(scope="session")
def workshop() -> Iterator[Workshop]:
    """buildah, podman and the local base."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    install_packages()
    shop = Workshop(FOLDER)
    shop.clean()  # what a run left that was killed
    make_base(shop)
    try:
        shop.podman("run", "--rm", "--network", "none", BASE, "true", advice="")
    except WorkshopError as error:
        pytest.skip(f"podman can't run a container here: {error}")
    yield shop
    shop.clean()


@pytest.fixture(scope="session")
def images(workshop: Workshop) -> Workshop:
    """The workshop with both images, the worker's for CPUs."""
    build(workshop, "scheduler", SCHEDULER)
    build(workshop, "worker", WORKER, TORCH=TORCH, COMPILER="python3")
    for image in (SCHEDULER, WORKER):
        size = int(workshop.podman("image", "inspect", "--format", "{{.Size}}", image))
        say(f"{image} has {size / 1e6:.0f} MB")
    return workshop
