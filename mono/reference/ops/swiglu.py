"""SwiGLU-OAI, the gated activation of every MLP and expert."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu_oai(gate_up: Tensor, alpha: float, beta: float, limit: float) -> Tensor:
    """A clamped, shifted SwiGLU.

        g = min(gate, limit);  u = clamp(up, -limit, limit);  y = g sigmoid(alpha g) (u + beta)

    Shapes:    gate_up [T, 2 F], gate columns then up columns. Returns [T, F] fp32.
    Rounding:  fp32, none at the end. The gate is clamped above only.
    Source:    the activation of OpenAI's gpt-oss, which interleaves gate and up; here they are split.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    g = gate.clamp(max=limit)
    u = up.clamp(-limit, limit)
    return g * torch.sigmoid(alpha * g) * (u + beta)
