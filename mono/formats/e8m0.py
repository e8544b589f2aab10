"""E8M0, the block scale of the MX formats: a byte c stands for 2^(c-127), 255 for NaN.

Byte 0 is 2^-127, which fp32 holds as a subnormal. There is no zero and no sign. All of it is bit arithmetic
on the exponent field of fp32, which has the same bias: no logarithm is rounded anywhere.

Source: OCP Microscaling Formats (MX) Specification 1.0, section 5.4.1.
"""

import torch
from torch import Tensor

from mono.formats.checks import check_dtype

NAN = 255
_FP32_MANTISSA_BITS = 23
_FP32_TWO_TO_MINUS_127 = 0x00400000
_FP32_NAN = 0x7FC00000


def decode(codes: Tensor) -> Tensor:
    """The fp32 scales 2^(c-127), exact.

    Shapes:  codes uint8, any shape; returns fp32 of the same shape. 255 gives NaN.
    Errors:  ValueError unless codes is uint8; a float8_e8m0fnu tensor is viewed as uint8 first.
    """
    check_dtype("e8m0: codes", codes, torch.uint8)
    bits = codes.int() << _FP32_MANTISSA_BITS
    bits = torch.where(codes == 0, _FP32_TWO_TO_MINUS_127, bits)
    bits = torch.where(codes == NAN, _FP32_NAN, bits)
    return bits.view(torch.float32)


def decode_inverse(codes: Tensor) -> Tensor:
    """The fp32 inverse scales 2^(127-c), exact, for codes 0 to 254; 255 gives NaN."""
    # 254 - 255 wraps to 255, so NaN stays NaN
    return decode(254 - codes)


def encode_ceil(x: Tensor) -> Tensor:
    """The smallest power of two that is at least x.

        c = ceil(log2(x)) + 127, clamped to [1, 254]

    Shapes:    x fp32, not negative, any shape; returns uint8 of the same shape.
    Rounding:  exact powers of two stay. Zero gives 1, infinity and NaN give 254.
    """
    bits = x.view(torch.int32)
    exponent = (bits >> _FP32_MANTISSA_BITS) & 0xFF
    past_a_power = (bits & 0x007FFFFF) != 0
    return (exponent + past_a_power.int()).clamp(1, 254).to(torch.uint8)


def encode_even(amax: Tensor) -> Tensor:
    """The MXFP4 scale by the rule called "even": amax is rounded up to 2^k from 1.75 * 2^(k-1) on.

        c = floor(log2(amax rounded)) - 2 + 127, clamped to [0, 254]

    The 2 is the exponent of the largest e2m1 value, 6 = 1.5 * 2^2. So amax / scale lies in [3.5, 7).

    Shapes:    amax fp32, finite and not negative, any shape; returns uint8 of the same shape.
    Rounding:  half a step of a 2-bit mantissa is added to the bits of amax, and the mantissa dropped.
               Zero and subnormal numbers give 0.
    """
    rounded = amax.view(torch.int32) + 0x00200000
    return ((rounded >> _FP32_MANTISSA_BITS) - 2).clamp(0, 254).to(torch.uint8)
