"""Token embedding: what goes in is the step's tokens, what comes out is the first partial output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mono.interface import LayerType


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes. `vocab` counts true tokens; `vocab_padded` the rows the table stores."""

    hidden: int
    vocab: int
    vocab_padded: int

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= self.vocab_padded:
            raise ValueError(f"embed: expected vocab from 1 to {self.vocab_padded} rows, got {self.vocab}")


@dataclass(frozen=True, slots=True)
class Weights:
    """table: [vocab_padded, H] bf16."""

    table: Tensor


TYPE = LayerType(
    name="embed",
    spec=Spec,
    weights=Weights,
    shapes=lambda s: {"table": (s.vocab_padded, s.hidden)},
    cuts={"table": "vocabulary"},
    dtypes={"table": torch.bfloat16},
)
