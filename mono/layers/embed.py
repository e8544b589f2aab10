"""Token embedding: what goes in is the step's tokens, what comes out is the first partial output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mono.interface import LayerType


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes. `vocab` counts true tokens; `vocab_padded` the rows the table stores."""

    hidden: int
    vocab: int
    vocab_padded: int


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
)
