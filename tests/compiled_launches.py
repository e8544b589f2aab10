"""What the compiler makes of the kernels that host code launches, with the shapes and settings they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compile_harness import Compiled, compile_kernel
from triton.runtime.jit import KernelInterface

from mono.fast.targets import Target


def compiled_launches(target: Target, call: Callable[[], Any]) -> dict[str, Compiled]:
    """Run `call` on meta tensors, compiling each launch for `target` instead; by kernel name."""
    made: dict[str, Compiled] = {}

    def getitem(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **settings: Any) -> None:
            made[kernel.__name__] = compile_kernel(kernel, args, settings, target)

        return launch

    before = KernelInterface.__getitem__
    KernelInterface.__getitem__ = getitem
    try:
        call()
    finally:
        KernelInterface.__getitem__ = before
    return made


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that has a shape and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
