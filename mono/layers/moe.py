"""Mixture of experts with a shared expert: norm, router, routed experts, shared expert, sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mono.deployment import Activations
from mono.formats import Matrix
from mono.interface import LayerType


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes, routing and formats.

    experts, topk:   E routed experts, K of them per row.
    scaling:         factor on the renormalised routed weights; the shared expert's weight is 1.
    routed_format:   format the routed experts are stored in.
    activations:     what a row is rounded to before an MX product: `mxfp8`, or `bf16`.
    shared:          `fused`: expert E of the routed table, always the last of K + 1 slots;
                     `apart`: matrices of its own; `none`.
    shared_intermediate: width of a shared expert that is apart; a fused one has the routed width.
    """

    hidden: int
    intermediate: int
    experts: int
    topk: int
    scaling: float
    eps: float
    alpha: float
    beta: float
    limit: float
    routed_format: str
    activations: Activations
    shared: Literal["fused", "apart", "none"]
    shared_intermediate: int

    def __post_init__(self) -> None:
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"moe: expected topk from 1 to {self.experts} experts, got {self.topk}")

    @property
    def table(self) -> int:
        """Experts in the table: E, and one more if the shared expert is fused."""
        return self.experts + (self.shared == "fused")

    @property
    def slots(self) -> int:
        """Table experts per row: K, and one more if the shared expert is fused."""
        return self.topk + (self.shared == "fused")


@dataclass(frozen=True, slots=True)
class Weights:
    """norm:            [H] bf16, zero-centred, Gemma form.
    router:          [E, H] fp32.
    bias:            [E] fp32, added to the scores for the choice only.
    gate_up:         [table, 2 F, H], gate rows then up rows of each expert.
    down:            [table, H, F].
    shared_gate_up:  [2 F', H]; shared_down: [H, F'], where the shared expert is apart.
    """

    norm: Tensor
    router: Tensor
    bias: Tensor
    gate_up: Matrix
    down: Matrix
    shared_gate_up: Matrix | None = None
    shared_down: Matrix | None = None


def shapes(s: Spec) -> dict[str, tuple[int, ...] | None]:
    """Whole shapes."""
    apart = s.shared == "apart"
    return {
        "norm": (s.hidden,),
        "router": (s.experts, s.hidden),
        "bias": (s.experts,),
        "gate_up": (s.table, 2 * s.intermediate, s.hidden),
        "down": (s.table, s.hidden, s.intermediate),
        "shared_gate_up": (2 * s.shared_intermediate, s.hidden) if apart else None,
        "shared_down": (s.hidden, s.shared_intermediate) if apart else None,
    }


TYPE = LayerType(
    name="moe",
    spec=Spec,
    weights=Weights,
    shapes=shapes,
    cuts={
        "norm": "replicated",
        "router": "replicated",
        "bias": "replicated",
        "gate_up": "expert rows",
        "down": "expert columns",
        "shared_gate_up": "rows",
        "shared_down": "columns",
    },
    dtypes={"norm": torch.bfloat16, "router": torch.float32, "bias": torch.float32},
)
