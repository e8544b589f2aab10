"""MXFP4: e2m1 codes, two to a byte, 32 along K to one E8M0 scale."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mono.formats import e2m1, e8m0
from mono.formats.checks import (
    check_dimensions,
    check_dtype,
    check_finite,
    check_groups,
    check_same_device,
    check_shape,
)
from mono.formats.stored import Stored

GROUP = 32


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4(Stored):
    """A matrix in MXFP4.

    packed:  uint8 [..., K/2], the even k in the low nibble.
    scale:   uint8 [..., K/32], E8M0.
    Value:   e2m1[k] * 2^(scale[k // 32] - 127).
    Errors:  ValueError, naming the field, for another dtype or shape, a K that is no multiple of 32, or
             two devices.
    """

    format_name: ClassVar[str] = "mxfp4"

    packed: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        check_dtype("mxfp4: packed", self.packed, torch.uint8)
        check_dtype("mxfp4: scale", self.scale, torch.uint8)
        check_dimensions("mxfp4: packed", self.packed, 1)
        *leading, k = self.shape
        check_groups("mxfp4: packed", k, GROUP)
        check_shape("mxfp4: scale", self.scale, (*leading, k // GROUP), f"one byte per {GROUP} of K = {k}")
        check_same_device("mxfp4", (self.packed, self.scale))

    @property
    def shape(self) -> torch.Size:
        """[..., K], in values: twice the bytes of a row."""
        *leading, half = self.packed.shape
        return torch.Size((*leading, 2 * half))

    def dequantise(self) -> Tensor:
        """fp32 [..., K], exact. Byte 255 gives NaN; what exceeds fp32, such as 4 * 2^126, is infinite."""
        values = e2m1.decode_packed(self.packed)
        blocks = values.reshape(*self.scale.shape, GROUP)  # [..., K/32, 32]
        return (blocks * e8m0.decode(self.scale).unsqueeze(-1)).flatten(-2)


def quantise(x: Tensor) -> Mxfp4:
    """The scale by the rule called "even".

    amax is the largest of 32 consecutive |x[k]|. With 2^n the power of two at or below it, amax' is 2^(n+1)
    if amax >= 1.75 * 2^n, otherwise amax itself. So amax / scale lies in [3.5, 7).

        c = floor(log2(amax')) - 2 + 127, clamped to [0, 254]
        code[k] = e2m1(x[k] * 2^(127 - c))

    Shapes:    x any float [..., K].
    Rounding:  scaled values in (6, 7) saturate at 6; the others go to nearest even.
    Errors:    ValueError if K is no multiple of 32, or, with the count, if x holds a NaN or an infinity.
    """
    check_dimensions("mxfp4: x", x, 1)
    check_groups("mxfp4: x", x.shape[-1], GROUP)
    check_finite("mxfp4: x", x)
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)  # [..., K/32, 32]
    scale = e8m0.encode_even(blocks.abs().amax(dim=-1))
    codes = e2m1.encode(blocks * e8m0.decode_inverse(scale).unsqueeze(-1)).flatten(-2)
    return Mxfp4(e2m1.pack(codes), scale)
