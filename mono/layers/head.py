"""Final norm, logits and top-1: what the drafts are judged by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mono.interface import LayerType


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes. `vocab` counts true tokens; columns from there to `vocab_padded` never win."""

    hidden: int
    vocab: int
    vocab_padded: int
    eps: float

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= self.vocab_padded:
            raise ValueError(f"head: expected vocab from 1 to {self.vocab_padded} rows, got {self.vocab}")


@dataclass(frozen=True, slots=True)
class Weights:
    """norm: [H] bf16, zero-centred, Gemma form. head: [vocab_padded, H] bf16."""

    norm: Tensor
    head: Tensor


TYPE = LayerType(
    name="head",
    spec=Spec,
    weights=Weights,
    shapes=lambda s: {"norm": (s.hidden,), "head": (s.vocab_padded, s.hidden)},
    cuts={"norm": "replicated", "head": "vocabulary"},
    dtypes={"norm": torch.bfloat16, "head": torch.bfloat16},
)
