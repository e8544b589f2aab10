"""The one way a kernel is launched: compiled on a GPU, interpreted exactly on CPU tensors."""

from __future__ import annotations

from typing import Any

import torch

from mono.fast.interpreter import launch_context


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **settings: Any) -> None:
    """Launch `kernel` over `grid` on tensors of `device`, with constexprs and options in `settings`."""
    with launch_context(device):
        kernel[grid](*args, **settings)
