"""FP8 e4m3 (`float8_e4m3fn`): sign, 4 exponent bits of bias 7, 3 mantissa bits, no infinity.

    normal     (-1)^s * 2^(e-7) * (1 + m/8)      e = 1..15, except e = 15 with m = 7, which is NaN
    subnormal  (-1)^s * 2^-6 * m/8               e = 0

Source: OCP 8-bit Floating Point Specification 1.0, table 1.
"""

import torch
from torch import Tensor

from mono.formats.checks import check_dtype

MAX = 448.0
SMALLEST = 2.0**-9  # the smallest positive value, a subnormal
_SIGN_EXPONENT_MANTISSA = -0x78100000  # 0x87F00000 as int32


def encode(x: Tensor) -> Tensor:
    """The nearest e4m3 value, saturating.

    Shapes:    any; returns float8_e4m3fn of x's shape.
    Rounding:  to nearest, ties to even; beyond 448, infinities included, to +-448. NaN stays NaN and -0
               stays -0. A float64 input is rounded to fp32 first.
    """
    # the clamp, and not the cast, saturates: up to torch 2.11 the cast turns what exceeds 464 into NaN
    return x.float().clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def decode(x: Tensor) -> Tensor:
    """The fp32 values of e4m3 codes, exact.

    Errors:  ValueError unless x is float8_e4m3fn; raw bytes are viewed as that type first.
    """
    check_dtype("e4m3: codes", x, torch.float8_e4m3fn)
    # by bits, which on a CPU is several times faster than the cast: with its sign moved to the front, a code
    # is the fp32 number 2^-120 times its value, subnormals included, except that NaN reads as 480
    bits = x.view(torch.int8).to(torch.int32)
    bits = bits.bitwise_left_shift_(20).bitwise_and_(_SIGN_EXPONENT_MANTISSA)
    values = bits.view(torch.float32).mul_(2.0**120)
    return values.masked_fill_(values.abs() > MAX, float("nan"))


def over_max(amax: Tensor) -> Tensor:
    """amax / 448 by true division in fp32. By a scalar, CUDA would multiply by the reciprocal instead."""
    return amax / torch.full_like(amax, MAX)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """One dynamic scale per vector along the last dimension.

        scale = max_k |x[k]| / 448         1.0 where that is zero
        x8[k] = e4m3(x[k] / scale)

    Shapes:    x [..., K]. Returns x8 float8_e4m3fn [..., K] and scale fp32 [...].
    Rounding:  the scale in fp32 by division; x / scale by true division in fp32, then as `encode`.
    Errors:    none. A NaN makes its scale NaN, and so its whole vector; an infinity makes its scale
               infinite and its vector NaN. Nothing is looked at on the host, so it can be captured.
    """
    x32 = x.float()
    amax_over_max = over_max(x32.abs().amax(dim=-1))
    # tested after the division: a subnormal amax can give a zero scale, and 0 / 0 would be NaN
    scale = torch.where(amax_over_max == 0, 1.0, amax_over_max)
    return encode(x32 / scale.unsqueeze(-1)), scale
