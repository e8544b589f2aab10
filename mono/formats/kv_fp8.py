"""The FP8 KV cache: e4m3 with one fp32 scale per token and KV head; index keys at unit scale."""

import torch
from torch import Tensor

from mono.formats import e4m3
from mono.formats.checks import check_dtype, check_shape


def quantise_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """One dynamic scale per head vector.

        scale = max_d |x[d]| / 448        1.0 for a vector of zeros
        x8[d] = e4m3(x[d] / scale)

    Shapes:    x any float [..., D]. Returns x8 float8_e4m3fn [..., D] and scale fp32 [...].
    Rounding:  scale and quotient in fp32 by true division, then to nearest even, saturating.
    Errors:    none, and no wait for the device. A NaN or an infinity makes its vector NaN, and no other.
    """
    return e4m3.quantise(x)


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """values[..., d] * scale[...], one rounding.

    Shapes:  values float8_e4m3fn [..., D], scale fp32 [...]. Returns fp32 [..., D].
    Errors:  ValueError, naming the field, for another dtype or shape.
    """
    check_dtype("kv_fp8: scale", scale, torch.float32)
    check_shape("kv_fp8: scale", scale, values.shape[:-1], "one scale per head vector")
    return e4m3.decode(values) * scale.unsqueeze(-1)


def encode_index_key(x: Tensor) -> Tensor:
    """Index keys are stored at unit scale: e4m3(x), saturating at +-448. float8_e4m3fn of x's shape."""
    return e4m3.encode(x)
