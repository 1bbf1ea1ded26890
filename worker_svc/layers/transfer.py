"""Host values on their way to a device. Knows nothing of what they mean."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """The same values there. Does not wait for what was launched before, as `Tensor.to` does by itself: the driver
    takes a copy of values in ordinary memory before this returns. On a CPU the tensor shares the array's memory."""
    return torch.from_numpy(values).to(device, non_blocking=True)
