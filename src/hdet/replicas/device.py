"""What the devices of this machine can do."""

from __future__ import annotations

from typing import Any

import torch


def accelerator() -> torch.device | None:
    """The accelerator that this process can use, or None.

    A build of torch for CUDA names ``cuda`` also on a machine without a device, so it is asked first.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def accelerator_module() -> Any:
    """``torch.cuda``, ``torch.mps`` or another module of that kind; None without an accelerator."""
    device = accelerator()
    return None if device is None else torch.get_device_module(device)


def widest_float(device: torch.device) -> torch.dtype:
    """Double precision where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64
