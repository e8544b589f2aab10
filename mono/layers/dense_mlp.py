"""The dense MLP of the prefix layers: norm, gate and up, SwiGLU-OAI, down."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mono.formats import Matrix
from mono.interface import LayerType


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes, and SwiGLU-OAI's parameters: slope alpha, offset beta, clamp limit."""

    hidden: int
    intermediate: int
    eps: float
    alpha: float
    beta: float
    limit: float


@dataclass(frozen=True, slots=True)
class Weights:
    """norm:     [H] bf16, zero-centred, Gemma form.
    gate_up:  [2 F, H], gate rows then up rows.
    down:     [H, F].
    """

    norm: Tensor
    gate_up: Matrix
    down: Matrix


TYPE = LayerType(
    name="dense_mlp",
    spec=Spec,
    weights=Weights,
    shapes=lambda s: {
        "norm": (s.hidden,),
        "gate_up": (2 * s.intermediate, s.hidden),
        "down": (s.hidden, s.intermediate),
    },
    cuts={"norm": "replicated", "gate_up": "rows", "down": "columns"},
    dtypes={"norm": torch.bfloat16},
)
