"""Gemma RMSNorm, and the residual sum it normalises."""

from __future__ import annotations

import torch
from torch import Tensor

from mono.interface import Carry
from mono.parallel import Comm
from mono.reference.numerics import NATIVE, Numerics


def absorb(carry: Carry, comm: Comm) -> Tensor:
    """The residual stream with the last slot's output in it: fp32(residual) + fp32(all-reduced partial).

    Shapes:    returns [T, H] fp32.
    Rounding:  none. The caller normalises this unrounded sum and stores it rounded once to bf16.
    """
    if carry.partial is None:
        return carry.residual.float()
    return carry.residual.float() + comm.all_reduce(carry.partial).float()


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float, numerics: Numerics = NATIVE) -> Tensor:
    """Scale each row to unit root mean square, then by `1 + weight`.

        y[..., h] = x[..., h] / sqrt(mean_h(x[..., h]^2) + eps) * (1 + weight[h])

    Shapes:    x [..., H], weight [H]. Returns [..., H] fp32.
    Units:     eps is in units of x squared.
    Rounding:  fp32 throughout and none at the end: whoever uses the result rounds it. `1 + weight` is
               formed in fp32, because in bf16 any |weight| below 2^-9 vanishes beside 1.
    Errors:    ValueError, naming both shapes, if weight does not have x's last dimension.
    Source:    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4; `1 + weight` is Gemma's form.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight is {list(weight.shape)}, x is {list(x.shape)}")
    x32 = x.float()
    mean_square = (numerics.sum(x32.square(), -1) / x.shape[-1]).unsqueeze(-1)
    return x32 * torch.rsqrt(mean_square + eps) * (1.0 + weight.float())
