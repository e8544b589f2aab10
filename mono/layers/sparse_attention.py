"""Block-sparse attention whose KV blocks an indexer picks, or an earlier layer's indexer picked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mono.formats import Matrix
from mono.interface import LayerType


@dataclass(frozen=True, slots=True)
class Spec:
    """Sizes of the whole layer, before any tensor-parallel cut.

    topk_blocks:   S, KV blocks a row attends to per KV head.
    init_blocks:   leading blocks always picked; local_blocks: trailing ones, the row's own included.
    selects:       True if the layer picks blocks itself; False if it reuses `carry.selected`.
    There is one index head per KV head, and one index key shared by all of them.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    eps: float
    block_size: int
    index_dim: int
    topk_blocks: int
    init_blocks: int
    local_blocks: int
    selects: bool

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"sparse_attention: expected heads a multiple of {self.kv_heads}, got {self.heads}"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head, and its selection."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Weights:
    """norm:                        [H] bf16, zero-centred, Gemma form.
    qkv:                         [(N + 2 G) x D + (G + 1) x I, H], rows q, k, v, index q heads, index k.
    q_norm, k_norm:              [D] bf16, zero-centred, shared by all heads of the kind.
    index_q_norm, index_k_norm:  [I] bf16, likewise.
    o:                           [H, N x D].
    rope:                        [max_positions, rotary_dim] fp32, cos | sin, shared by every head kind.
    """

    norm: Tensor
    qkv: Matrix
    q_norm: Tensor
    k_norm: Tensor
    index_q_norm: Tensor
    index_k_norm: Tensor
    o: Matrix
    rope: Tensor


def shapes(s: Spec) -> dict[str, tuple[int, ...] | None]:
    """Whole shapes; the RoPE table has as many rows as positions are served, so -1 rows here."""
    return {
        "norm": (s.hidden,),
        "qkv": ((s.heads + 2 * s.kv_heads) * s.head_dim + (s.kv_heads + 1) * s.index_dim, s.hidden),
        "q_norm": (s.head_dim,),
        "k_norm": (s.head_dim,),
        "index_q_norm": (s.index_dim,),
        "index_k_norm": (s.index_dim,),
        "o": (s.hidden, s.heads * s.head_dim),
        "rope": (-1, s.rotary_dim),
    }


TYPE = LayerType(
    name="sparse_attention",
    spec=Spec,
    weights=Weights,
    shapes=shapes,
    cuts={
        "norm": "replicated",
        "qkv": "heads",
        "q_norm": "replicated",
        "k_norm": "replicated",
        "index_q_norm": "replicated",
        "index_k_norm": "replicated",
        "o": "columns",
        "rope": "replicated",
    },
    dtypes={
        "norm": torch.bfloat16,
        "q_norm": torch.bfloat16,
        "k_norm": torch.bfloat16,
        "index_q_norm": torch.bfloat16,
        "index_k_norm": torch.bfloat16,
        "rope": torch.float32,
    },
)
