"""The router: scores, choice and weights of the routed experts."""

from __future__ import annotations

import torch
from torch import Tensor

from mono.reference.numerics import NATIVE, Numerics


def route(
    x: Tensor, router: Tensor, bias: Tensor, topk: int, scaling: float, numerics: Numerics = NATIVE
) -> tuple[Tensor, Tensor]:
    """The `topk` experts of each row, best first, and their weights.

        s = sigmoid(x W^T);  pick = top-k of s + bias;  w = s[pick] / max(sum s[pick], 1e-20) x scaling

    Shapes:    x [T, H] bf16, router [E, H] fp32, bias [E] fp32. Returns ids [T, K] int64 and weights
               [T, K] fp32.
    Rounding:  fp32 product, sigmoid and bias. The bias chooses and never weighs.
    Ties:      equal s + bias goes to the lower expert id.
    Source:    DeepSeek-V3's auxiliary-loss-free routing, arXiv:2412.19437, section 2.1.2.
    """
    score = torch.sigmoid(numerics.matmul(x.float(), router))
    order = torch.argsort(score + bias, dim=-1, descending=True, stable=True)
    ids = order[:, :topk]
    chosen = score.gather(1, ids)
    total = numerics.sum(chosen, 1).clamp(min=1e-20)
    return ids, chosen / total[:, None] * scaling
