"""Rotary position embedding of the leading dims of a head."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(positions: int, rotary_dim: int, theta: float) -> Tensor:
    """cos | sin of every position, computed in float64 and rounded once.

        inv_freq[d] = theta^(-2 d / rotary_dim),  d = 0 .. rotary_dim/2 - 1

    Shapes:    returns [positions, rotary_dim] fp32; both arms read this one table.
    Rounding:  float64 to fp32. In fp32 the angle itself would be off by 5e-3 near position 243,000.
    """
    half = rotary_dim // 2
    inv_freq = theta ** (-torch.arange(half, dtype=torch.float64) * 2.0 / rotary_dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inv_freq[None, :]
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def rope(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Turn each pair (d, d + rotary_dim/2) by its position's angle; dims past rotary_dim pass through.

        y[d]        = x[d] cos - x[d + half] sin
        y[d + half] = x[d + half] cos + x[d] sin

    Shapes:    x [T, heads, D] fp32, table [max_positions, rotary_dim] fp32, positions [T] int64.
               Returns [T, heads, D] fp32.
    Rounding:  fp32, none at the end.
    Source:    Su et al. 2021, arXiv:2104.09864, in the half-split ("NeoX") layout.
    """
    half = table.shape[1] // 2
    cos, sin = table[positions].unsqueeze(1).split(half, dim=-1)  # [T, 1, half] each
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
