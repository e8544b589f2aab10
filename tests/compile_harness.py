"""Compile kernels for GPUs that this machine need not have, and read what the compiler made of them.

    compiled = compile_kernel(kernel, (torch.bfloat16, 4096), {"BLOCK": 128}, SM90, num_warps=4)
    assert compiled.spills == 0 and compiled.matches(r"wgmma")

A compiler sees what an interpreter cannot: code that Triton refuses, spills, shared memory, instructions.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.driver import DriverBase
from triton.runtime.jit import KernelInterface

from mono.fast.targets import Target, refuse_target


class NoDevice(DriverBase):
    """A Triton driver that only says what to compile for; it shadows the GPU of a machine that has one."""

    def __init__(self, target: Target) -> None:
        self.target = target.triton

    @classmethod
    def is_active(cls) -> bool:
        return False

    def get_current_target(self):
        return self.target

    def get_current_device(self) -> str:
        return repr(self.target)  # keys the kernel cache in memory

    def get_current_stream(self, device: Any) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self):
        raise NotImplementedError


@contextlib.contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Inside, `kernel.warmup` compiles for `target` from an empty disk cache: a stale entry hides errors."""
    if reason := refuse_target(target):
        raise ValueError(reason)
    driver = triton.runtime.driver
    before = driver._active
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
        driver._active = NoDevice(target)
        triton.knobs.cache.dir = cache
        try:
            yield
        finally:
            driver._active = before


@dataclass(frozen=True)
class Compiled:
    """Registers a thread; spills in bytes (NVIDIA) or registers (AMD); shared bytes; PTX or AMDGCN."""

    registers: int
    spills: int
    shared: int
    asm: str

    def matches(self, pattern: str) -> bool:
        """Whether the assembly holds the regular expression, say `wgmma` or `v_mfma`."""
        return re.search(pattern, self.asm) is not None


def compile_kernel(
    kernel: Any, args: Sequence[Any], constexprs: dict[str, Any], target: Target, **options: Any
) -> Compiled:
    """Compile one launch for `target` and read its resources.

    args:        as a launch passes them; for a tensor a `torch.dtype`, or a meta tensor of the real shape.
                 Integers are specialised as in a launch: 1 and multiples of 16 give other code.
    constexprs:  by name. options: num_warps, num_stages, ...
    Raises ValueError for a refused target, AssertionError if shared memory exceeds the target's.
    """
    with compiling_for(target):
        made = kernel.warmup(*args, grid=(1,), **constexprs, **options)
    shared = made.metadata.shared
    assert shared <= target.shared_memory, (
        f"{kernel.__name__} takes {shared} bytes of shared memory, {target.name} has {target.shared_memory}"
    )
    if target.backend == "cuda":
        registers, spills = _cubin_resources(made.asm["cubin"])
        return Compiled(registers, spills, shared, made.asm["ptx"])
    registers, spills = _amdgcn_resources(made.asm["amdgcn"])
    return Compiled(registers, spills, shared, made.asm["amdgcn"])


def _cubin_resources(cubin: bytes) -> tuple[int, int]:
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [cuobjdump, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    used = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout + done.stderr))
    return int(used["REG"]), int(used["STACK"]) + int(used["LOCAL"])


def _amdgcn_resources(asm: str) -> tuple[int, int]:
    def count(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", asm)
        assert found is not None, f"no .{name} in the assembly"
        return int(found[1])

    spills = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")
    return count("vgpr_count"), sum(count(name) for name in spills)


@contextlib.contextmanager
def capture_check(target: Target) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Run host code on meta tensors: every launch is compiled for `target` and noted as (kernel, grid).

    Proves that the code reads no device data on the host (a meta tensor has none), that its grids are plain
    integers, and how many kernels it launches: what a CUDA graph needs. It does not prove the capture itself.
    """
    launches: list[tuple[str, tuple[int, ...]]] = []

    def getitem(kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **kw: Any) -> Any:
            size = tuple(grid(kw) if callable(grid) else grid)
            assert all(type(n) is int for n in size), (
                f"{kernel.__name__}: grid {size} is not of plain integers"
            )
            launches.append((kernel.__name__, size))
            return kernel.warmup(*args, grid=size, **kw)

        return launch

    before = KernelInterface.__getitem__
    with compiling_for(target):
        KernelInterface.__getitem__ = getitem
        try:
            yield launches
        finally:
            KernelInterface.__getitem__ = before
