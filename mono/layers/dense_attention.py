"""Full causal attention with grouped queries: MiniMax-M3's layers 0..2."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mono.formats import Matrix
from mono.interface import LayerType


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes of the whole layer, before any tensor-parallel cut.

    rotary_dim: leading dims of each head that RoPE turns. block_size: tokens of a KV block (a page).
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    eps: float
    block_size: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"dense_attention: expected heads a multiple of {self.kv_heads}, got {self.heads}"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Weights:
    """norm:            [H] bf16, zero-centred, Gemma form.
    qkv:             [(N + 2 G) x D, H], rows q heads, k heads, v heads.
    q_norm, k_norm:  [D] bf16, zero-centred, shared by all heads of the kind.
    o:               [H, N x D].
    rope:            [max_positions, rotary_dim] fp32, cos | sin, one table for all layers and both arms.
    """

    norm: Tensor
    qkv: Matrix
    q_norm: Tensor
    k_norm: Tensor
    o: Matrix
    rope: Tensor


def shapes(s: Spec) -> dict[str, tuple[int, ...] | None]:
    """Whole shapes; the RoPE table has as many rows as positions are served, so -1 rows here."""
    return {
        "norm": (s.hidden,),
        "qkv": ((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden),
        "q_norm": (s.head_dim,),
        "k_norm": (s.head_dim,),
        "o": (s.hidden, s.heads * s.head_dim),
        "rope": (-1, s.rotary_dim),
    }


TYPE = LayerType(
    name="dense_attention",
    spec=Spec,
    weights=Weights,
    shapes=shapes,
    cuts={
        "norm": "replicated",
        "qkv": "heads",
        "q_norm": "replicated",
        "k_norm": "replicated",
        "o": "columns",
        "rope": "replicated",
    },
    dtypes={
        "norm": torch.bfloat16,
        "q_norm": torch.bfloat16,
        "k_norm": torch.bfloat16,
        "rope": torch.float32,
    },
)
