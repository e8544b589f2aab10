"""MXFP8: e4m3 codes, 32 along K to one E8M0 scale."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mono.formats import e4m3, e8m0
from mono.formats.checks import check_dimensions, check_dtype, check_groups, check_same_device, check_shape
from mono.formats.stored import Stored

GROUP = 32


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp8(Stored):
    """A matrix in MXFP8.

    values:  float8_e4m3fn [..., K].
    scale:   uint8 [..., K/32], E8M0.
    Value:   values[k] * 2^(scale[k // 32] - 127).
    Errors:  ValueError, naming the field, for another dtype or shape, a K that is no multiple of 32, or
             two devices.
    """

    format_name: ClassVar[str] = "mxfp8"

    values: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        check_dtype("mxfp8: values", self.values, torch.float8_e4m3fn)
        check_dtype("mxfp8: scale", self.scale, torch.uint8)
        check_dimensions("mxfp8: values", self.values, 1)
        *leading, k = self.values.shape
        check_groups("mxfp8: values", k, GROUP)
        check_shape("mxfp8: scale", self.scale, (*leading, k // GROUP), f"one byte per {GROUP} of K = {k}")
        check_same_device("mxfp8", (self.values, self.scale))

    @property
    def shape(self) -> torch.Size:
        """[..., K]."""
        return self.values.shape

    def dequantise(self) -> Tensor:
        """fp32 [..., K], exact. Byte 255 gives NaN; what exceeds fp32, such as 448 * 2^120, is infinite."""
        blocks = e4m3.decode(self.values).reshape(*self.scale.shape, GROUP)  # [..., K/32, 32]
        return (blocks * e8m0.decode(self.scale).unsqueeze(-1)).flatten(-2)


def quantise(x: Tensor) -> Mxfp8:
    """The scale is the smallest power of two that brings a block within e4m3, so nothing saturates.

        c = ceil(log2(amax / 448)) + 127, clamped to [1, 254]       amax over 32 consecutive k
        x8[k] = e4m3(x[k] * 2^(127 - c))

    Shapes:    x any float [..., K].
    Rounding:  the ceiling by bit arithmetic, so amax = 448 * 2^n does not round up; the elements to nearest
               even; the product with the power of two is exact down to where e4m3 is zero.
    Errors:    ValueError if K is no multiple of 32. Values are not checked, for activations pass here too and
               must not wait for the device: a NaN keeps its place as a NaN code, an infinity becomes the code
               448; both get the scale byte 254, under which 448 decodes to infinity. A weight goes through
               `check_finite` first.
    """
    check_dimensions("mxfp8: x", x, 1)
    check_groups("mxfp8: x", x.shape[-1], GROUP)
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)  # [..., K/32, 32]
    scale = e8m0.encode_ceil(e4m3.over_max(blocks.abs().amax(dim=-1)))
    return Mxfp8(e4m3.encode(blocks * e8m0.decode_inverse(scale).unsqueeze(-1)).flatten(-2), scale)
