"""NVFP4: e2m1 codes, two to a byte, 16 along K to one e4m3 scale, and one fp32 scale per matrix.

Two conventions are in use and nothing in the bytes tells them apart: compressed-tensors stores a global
scale that divides (`weight_global_scale`), ModelOpt one that multiplies (`weight_scale_2`). So each matrix
names its own.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from mono.formats import e2m1, e4m3
from mono.formats.checks import (
    check_dimensions,
    check_dtype,
    check_finite,
    check_groups,
    check_same_device,
    check_shape,
)
from mono.formats.stored import Index, Stored

GROUP = 16
Convention = Literal["compressed-tensors", "modelopt"]


@dataclass(frozen=True, slots=True, eq=False)
class Nvfp4(Stored):
    """A matrix in NVFP4.

    packed:        uint8 [..., K/2], the even k in the low nibble.
    scale:         float8_e4m3fn [..., K/16].
    global_scale:  fp32, a scalar, or of the first dimensions of `packed`: one per expert [E], or one per row
                   [E, N] where matrices of different global scales are stacked.
    convention:    "compressed-tensors" divides by the global scale, "modelopt" multiplies.
    Value:         e2m1[k] * scale[k // 16] / global_scale, or * global_scale.
    Errors:        ValueError, naming the field, for another dtype, shape or convention, a K that is no
                   multiple of 16, or two devices.
    """

    format_name: ClassVar[str] = "nvfp4"

    packed: Tensor
    scale: Tensor
    global_scale: Tensor
    convention: Convention

    def __post_init__(self) -> None:
        _check_convention(self.convention)
        check_dtype("nvfp4: packed", self.packed, torch.uint8)
        check_dtype("nvfp4: scale", self.scale, torch.float8_e4m3fn)
        check_dtype("nvfp4: global_scale", self.global_scale, torch.float32)
        check_dimensions("nvfp4: packed", self.packed, 1)
        *leading, k = self.shape
        check_groups("nvfp4: packed", k, GROUP)
        check_shape("nvfp4: scale", self.scale, (*leading, k // GROUP), f"one scale per {GROUP} of K = {k}")
        check_shape(
            "nvfp4: global_scale",
            self.global_scale,
            leading[: self.global_scale.dim()],
            "a scalar, or the first dimensions of packed",
        )
        check_same_device("nvfp4", (self.packed, self.scale, self.global_scale))

    @property
    def shape(self) -> torch.Size:
        """[..., K], in values: twice the bytes of a row."""
        *leading, half = self.packed.shape
        return torch.Size((*leading, 2 * half))

    def __getitem__(self, index: Index) -> "Nvfp4":
        """Index the leading dimensions, never K. A scalar global scale stays, a longer one is indexed too."""
        indices = index if isinstance(index, tuple) else (index,)
        global_scale = self.global_scale[indices[: self.global_scale.dim()]]
        return Nvfp4(self.packed[index], self.scale[index], global_scale, self.convention)

    def dequantise(self) -> Tensor:
        """fp32 [..., K]. The product of code and scale is exact; one rounding, by the global scale."""
        values = e2m1.decode_packed(self.packed)
        blocks = values.reshape(*self.scale.shape, GROUP)  # [..., K/16, 16]
        scaled = (blocks * e4m3.decode(self.scale).unsqueeze(-1)).flatten(-2)
        return _apply_global(scaled, self.global_scale, self.convention)


def quantise(x: Tensor, convention: Convention) -> Nvfp4:
    """Two levels of scale: the largest block of a matrix gets the block scale 448.

        unit = max |x| / (448 * 6)                     over one matrix [N, K]; 1 for a matrix of zeros
        global_scale = 1 / unit ("compressed-tensors") or unit ("modelopt")
        scale = e4m3(max(amax / 6 / unit, 2^-9))       amax over 16 consecutive k
        code[k] = e2m1(x[k] / (scale * unit))

    Shapes:    x any float [..., N, K], or [K]. The global scale has the shape [...], one per matrix.
    Rounding:  scales and quotients in fp32, codes to nearest even, saturating at 6. The floor 2^-9, the
               smallest e4m3 value, keeps a small block from being lost to a zero scale.
    Errors:    ValueError if K is no multiple of 16, for another convention, or, with the count, if x holds a
               NaN or an infinity.
    """
    _check_convention(convention)
    check_dimensions("nvfp4: x", x, 1)
    check_groups("nvfp4: x", x.shape[-1], GROUP)
    check_finite("nvfp4: x", x)
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)  # [..., N, K/16, 16]
    block_max = blocks.abs().amax(dim=-1)  # [..., N, K/16]
    matrix_max = block_max.amax(dim=(-2, -1) if x.dim() > 1 else -1)

    full = e4m3.MAX * e2m1.MAX
    # below this the global scale or its inverse leaves fp32
    matrix_max = torch.where(matrix_max == 0, full, matrix_max.clamp(min=full * 2.0**-126))
    global_scale = full / matrix_max if convention == "compressed-tensors" else matrix_max / full

    wanted = _remove_global(block_max / e2m1.MAX, global_scale, convention)
    scale = e4m3.encode(wanted.clamp(min=e4m3.SMALLEST))
    step = _apply_global(e4m3.decode(scale), global_scale, convention)
    codes = e2m1.encode(blocks / step.unsqueeze(-1)).flatten(-2)
    return Nvfp4(e2m1.pack(codes), scale, global_scale, convention)


def _check_convention(convention: str) -> None:
    if convention not in get_args(Convention):
        raise ValueError(f"nvfp4: convention is {convention!r}, expected one of {get_args(Convention)}")


def _apply_global(x: Tensor, global_scale: Tensor, convention: Convention) -> Tensor:
    """x [..., K'] under a global scale of its first dimensions."""
    aligned = global_scale.reshape(global_scale.shape + (1,) * (x.dim() - global_scale.dim()))
    return x / aligned if convention == "compressed-tensors" else x * aligned


def _remove_global(x: Tensor, global_scale: Tensor, convention: Convention) -> Tensor:
    """The inverse of `_apply_global`."""
    aligned = global_scale.reshape(global_scale.shape + (1,) * (x.dim() - global_scale.dim()))
    return x * aligned if convention == "compressed-tensors" else x / aligned
