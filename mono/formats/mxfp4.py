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
    Errors:  ValueError, naming the field, for another dtype, shape, a K that 32 does not divide, or two devices.
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
        """fp32 [..., K], exact. What exceeds fp32 (4 and 6 under 2^126 or 2^127) becomes infinite; byte 255 is NaN."""
        blocks = e2m1.decode(e2m1.unpack(self.packed)).unflatten(-1, (self.scale.shape[-1], GROUP))
        return (blocks * e8m0.decode(self.scale).unsqueeze(-1)).flatten(-2)


def quantise(x: Tensor) -> Mxfp4:
    """The scale by the rule called "even": amax / scale lies in [3.5, 7).

        c = exponent(amax + 1/4 of its power of two) - 2 + 127, clamped to [0, 254]    amax over 32 consecutive k
        code[k] = e2m1(x[k] * 2^(127 - c))

    Shapes:    x any float [..., K].
    Rounding:  scaled values in (6, 7) saturate at 6; the others go to nearest even.
    Errors:    ValueError if 32 does not divide K, or, with the count, if x holds a NaN or an infinity.
    """
    check_dimensions("mxfp4: x", x, 1)
    check_groups("mxfp4: x", x.shape[-1], GROUP)
    check_finite("mxfp4: x", x)
    blocks = x.float().unflatten(-1, (x.shape[-1] // GROUP, GROUP))
    scale = e8m0.encode_even(blocks.abs().amax(dim=-1))
    codes = e2m1.encode(blocks * e8m0.decode_inverse(scale).unsqueeze(-1)).flatten(-2)
    return Mxfp4(e2m1.pack(codes), scale)
