"""The GPUs that kernels are compiled for, and the ones that are refused.

A compile check needs no GPU: it builds every kernel for each of these and reads what the compiler reports.
"""

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of GPU.

    name:           as its vendor names the architecture.
    triton:         the same for `triton.compile`.
    shared_memory:  bytes that one program may use. Exceeding it is no compile error, only a failed launch.
    fp8:            the FP8 type of its matrix units, as torch names it.
    """

    name: str
    triton: GPUTarget
    shared_memory: int
    fp8: str

    @property
    def backend(self) -> str:
        """`cuda` or `hip`."""
        return str(self.triton.backend)


# H100 and H200; B200; MI300X and MI325X; MI355X
SM90 = Target("sm_90", GPUTarget("cuda", 90, 32), 232_448, "float8_e4m3fn")
SM100 = Target("sm_100", GPUTarget("cuda", 100, 32), 232_448, "float8_e4m3fn")
GFX942 = Target("gfx942", GPUTarget("hip", "gfx942", 64), 65_536, "float8_e4m3fnuz")
GFX950 = Target("gfx950", GPUTarget("hip", "gfx950", 64), 163_840, "float8_e4m3fn")

TARGETS = {target.name: target for target in (SM90, SM100, GFX942, GFX950)}


def refuse_target(target: Target) -> str | None:
    """Why no kernel is compiled for this target, or None."""
    if target.fp8 != "float8_e4m3fn":
        return (
            f"{target.name} computes in {target.fp8}, which reads the same codes as other values; "
            "every stored FP8 value here is float8_e4m3fn"
        )
    return None


SUPPORTED = {name: target for name, target in TARGETS.items() if refuse_target(target) is None}
"""The targets that every kernel must compile for."""
