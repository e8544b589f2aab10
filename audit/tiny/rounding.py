"""Fake quantisation: the value a tensor has after a trip through a stored format, as fp32.

Training and its measurements need only values, on any device and in bulk; the bytes themselves are written
with `mono.formats`, and `tests/audit/test_embedded.py` holds the two together.
"""

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_STEPS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints of 0, .5, 1, 1.5, 2, 3, 4, 6


def e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 value, ties to even, saturating at 448. x fp32, any shape."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def per_row_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (as fp32 values) and scale amax/448 of each row;

    scale 1.0 for a row of zeros. [..., K] -> [..., K], [..., 1].
    """
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
    return e4m3(x / scale), scale


def mxfp8(x: Tensor) -> Tensor:
    """Values after MXFP8:

    e4m3 codes, one power of two ceil(log2(amax / 448)) to 32. [..., K] -> [..., K] fp32.
    """
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-126, 127)
    exponent = torch.where(amax > 0, exponent, torch.full_like(exponent, -126))
    return torch.ldexp(e4m3(torch.ldexp(groups, -exponent)), exponent).flatten(-2)


def mxfp4(x: Tensor) -> Tensor:
    """Values after MXFP4 with the "even" scale rule. [..., K] -> [..., K] fp32.

    Scale: 0x200000 added to the bits of amax, mantissa dropped, exponent less 2.
    Codes: e2m1, ties to the even code.
    """
    groups = x.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True).contiguous()
    exponent = (((amax.view(torch.int32) + 0x200000) >> 23) & 0xFF) - 127 - 2
    exponent = exponent.clamp(-127, 127)
    scaled = torch.ldexp(groups, -exponent)
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.int32)
    for below, step in enumerate(E2M1_STEPS):
        # a tie goes up where the code above is even
        code += ((size >= step) if below % 2 else (size > step)).int()
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=x.device)
    return torch.ldexp(steps[code.long()] * scaled.sign(), exponent).flatten(-2)


def heads_fp8(x: Tensor) -> Tensor:
    """Values after the KV cache:

    e4m3 codes, one scale amax/448 per token and head. [..., D] -> [..., D] fp32.
    """
    codes, scale = per_row_fp8(x)
    return codes * scale
