"""What the environment of a rank must hold before it imports torch."""

import os

from shared.errors import StartupError
from worker_svc.routes import interface_to

_SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# NVLink multicast is state of the switch that all GPUs of a host share: a process that is killed while it uses it can
# leave GPUs of others out of service. Nothing here needs it.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}

# Torch's own watch over NCCL reads the rendezvous file, which is gone once all ranks are warm; the launcher watches.
_NO_WATCHDOG = {"TORCH_NCCL_ENABLE_MONITORING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}

# Tensors of a step come and go on the host. glibc would give their memory back to the kernel, which zeroes it page by
# page for the next step: a third of a rank's work on CPUs. Both bounds are the highest that it would come to by itself;
# where one is set it searches for neither, and would map what is larger than the other anew in each step.
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}


def rank_environment(threads: int = 1, peer_host: str | None = None) -> dict[str, str]:
    """What is to be added. `peer_host` is the address of a node that this one must reach; None: the group is on one
    host, and listens there alone. Raises StartupError where there is no telling how a node is reached."""
    interfaces = dict.fromkeys(_SOCKETS, "lo") if peer_host is None else _interfaces(peer_host)
    memory = {name: os.environ.get(name) or value for name, value in _KEPT.items()}
    return {"OMP_NUM_THREADS": str(threads), **interfaces, **memory, **_NO_MULTICAST, **_NO_WATCHDOG}


def _interfaces(peer_host: str) -> dict[str, str]:
    """A user's own choice stands."""
    unset = [name for name in _SOCKETS if not os.environ.get(name)]
    try:
        return {name: interface_to(peer_host) for name in unset}
    except OSError as error:
        raise StartupError(f"can't tell the network interface to {peer_host} ({error}): set {unset[0]}") from None
