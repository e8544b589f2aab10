"""FP4 e2m1: sign, 2 exponent bits, 1 mantissa bit; two codes to a byte. No infinity and no NaN.

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.3.3.
"""

from functools import cache

import torch
from torch import Tensor

from mono.formats.checks import check_dtype

MAX = 6.0
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # number i lies between codes i and i + 1


def decode(codes: Tensor) -> Tensor:
    """The fp32 values of e2m1 codes, exact.

    Shapes:  codes uint8 in 0..15, one per element, any shape; returns fp32 of the same shape.
    Errors:  ValueError unless codes is uint8. A code above 15 is an index out of range.
    """
    check_dtype("e2m1: codes", codes, torch.uint8)
    return _values(codes.device)[codes.int()]


def decode_packed(packed: Tensor) -> Tensor:
    """The fp32 values of packed codes, exact: `decode(unpack(packed))`, a byte at a time.

    Shapes:  packed uint8 [..., K/2]; returns fp32 [..., K].
    Errors:  ValueError unless packed is uint8.
    """
    check_dtype("e2m1: packed", packed, torch.uint8)
    return torch.nn.functional.embedding(packed.int(), _pairs(packed.device)).flatten(-2)


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """[256, 2] fp32, the two values of every byte."""
    byte = torch.arange(256, device=device)
    return _values(device)[torch.stack((byte & 15, byte >> 4), dim=1)]


def encode(x: Tensor) -> Tensor:
    """The codes of the nearest e2m1 values, saturating.

    Shapes:    x any float, any shape; returns uint8 codes of the same shape.
    Rounding:  to nearest, ties to the even code; beyond 6, infinities included, to +-6. The sign of a zero,
               also of a number that rounds to zero, is kept. A float64 input is rounded to fp32 first.
    Errors:    ValueError, with the count, if x holds a NaN: the format has none. The check waits for the
               device; nothing is quantised to FP4 during a step.
    """
    x32 = x.float()
    nans = int(torch.isnan(x32).sum())
    if nans:
        raise ValueError(f"e2m1: {nans} NaN of {x.numel()} values, expected none: the format has no NaN")
    # the magnitude code is the number of bounds below |x|; a tie goes up only from an odd code
    bounds = torch.tensor(_MIDPOINTS, dtype=torch.float32, device=x.device)
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros_like(bounds[1::2]))
    magnitude = torch.bucketize(x32.abs().contiguous(), bounds, out_int32=True)
    return (magnitude + 8 * torch.signbit(x32)).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Two codes to a byte, the even k in the low nibble.

    Shapes:  codes uint8 [..., K] in 0..15; returns uint8 [..., K/2].
    Errors:  ValueError unless codes is uint8, K even, and every code below 16.
    """
    check_dtype("e2m1: codes", codes, torch.uint8)
    if codes.shape[-1] % 2:
        raise ValueError(f"e2m1: codes has K = {codes.shape[-1]}, expected an even number: two to a byte")
    wide = int((codes > 15).sum())
    if wide:
        raise ValueError(f"e2m1: {wide} codes exceed 15, expected 4 bits each")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`: uint8 [..., K/2] to uint8 codes [..., K].

    Errors:  ValueError unless packed is uint8.
    """
    check_dtype("e2m1: packed", packed, torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
