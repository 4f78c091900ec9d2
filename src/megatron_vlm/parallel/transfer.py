"""Copies from the host to the device that nobody waits for."""

import numpy as np
import torch
from torch import Tensor


def on_device(numbers: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """The numbers on a device. What leaves the host is copied out of pinned memory, behind the work that the
    device has to do: from other memory, or blocking, the host would wait until all of that is done."""
    tensor = torch.from_numpy(numbers) if isinstance(numbers, np.ndarray) else numbers
    if tensor.device.type == "cpu" and device.type != "cpu":
        tensor = tensor.contiguous().pin_memory()  # else the driver's copy would need a copy itself
    return tensor.to(device, non_blocking=True)
