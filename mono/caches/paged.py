"""Paged FP8 caches of one decoder layer, and the pool that hands out pages."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, fields
from typing import get_args

import torch
from torch import Tensor

from mono.deployment import KvFormat
from mono.formats import kv_fp8


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one decoder layer. A page holds one KV block of `block_size` tokens.

    k, v:              [P, block, G, D] float8_e4m3fn, or bf16.
    k_scale, v_scale:  [P, block, G] fp32, one scale per token and KV head; 1.0 in a bf16 cache.
    index_k:           [P, block, I] like k, at unit scale; None where the layer has no indexer.

    Row p x block + o of the flattened first two dimensions is *slot* p x block + o.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    index_k: Tensor | None = None

    @staticmethod
    def empty(
        pages: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        index_dim: int | None,
        device: torch.device | str = "cpu",
        kv_format: str = "fp8_e4m3",
    ) -> LayerCache:
        """A cache whose every value reads as NaN until it is written: nothing may depend on it."""
        if kv_format not in get_args(KvFormat):
            raise ValueError(f"cache: expected a format of {get_args(KvFormat)}, got {kv_format!r}")

        def nan(*shape: int) -> Tensor:
            if kv_format == "bf16":
                return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
            return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)

        scale = torch.full((pages, block_size, kv_heads), float("nan"), device=device)
        return LayerCache(
            k=nan(pages, block_size, kv_heads, head_dim),
            v=nan(pages, block_size, kv_heads, head_dim),
            k_scale=scale,
            v_scale=scale.clone(),
            index_k=None if index_dim is None else nan(pages, block_size, index_dim),
        )

    @property
    def pages(self) -> int:
        """P, pages it holds."""
        return self.k.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[1]

    @property
    def kv_format(self) -> KvFormat:
        """What it stores, in a deployment's words."""
        return "bf16" if self.k.dtype == torch.bfloat16 else "fp8_e4m3"

    def insert_kv(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the rows whose slot is not negative.

        Shapes:    slots [T] int64; k, v [T, G, D] bf16.
        Rounding:  e4m3 with scale amax / 448 per token and KV head, 1.0 for a zero vector; none in a
                   bf16 cache.
        """
        live = slots >= 0
        at = slots[live]
        for x, values, scales in ((k, self.k, self.k_scale), (v, self.v, self.v_scale)):
            if values.dtype == torch.bfloat16:
                values.flatten(0, 1)[at] = x[live]
                scales.flatten(0, 1)[at] = 1.0
                continue
            x8, scale = kv_fp8.quantise_heads(x[live])
            _bytes(values)[at] = x8.view(torch.uint8)
            scales.flatten(0, 1)[at] = scale

    def insert_index_k(self, slots: Tensor, index_k: Tensor) -> None:
        """Store index keys [T, I] bf16, as e4m3 at unit scale or as they are; none at a negative slot."""
        if self.index_k is None:
            raise ValueError("cache.index_k: this layer has no index cache")
        live = slots >= 0
        if self.index_k.dtype == torch.bfloat16:
            self.index_k.flatten(0, 1)[slots[live]] = index_k[live]
            return
        _bytes(self.index_k)[slots[live]] = kv_fp8.encode_index_key(index_k[live]).view(torch.uint8)

    def clone(self) -> LayerCache:
        """A copy that shares no memory."""
        return LayerCache(*(None if x is None else x.clone() for x in self._tensors()))  # type: ignore[arg-type]

    def copy_(self, other: LayerCache) -> None:
        """Overwrite this cache's bytes with another of the same shapes."""
        for mine, theirs in zip(self._tensors(), other._tensors(), strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)

    def _tensors(self) -> list[Tensor | None]:
        return [getattr(self, f.name) for f in fields(self)]


def _bytes(values: Tensor) -> Tensor:
    """[P, block, ...] fp8 as [slots, ...] uint8, a view: torch does not index-assign fp8."""
    return values.view(torch.uint8).flatten(0, 1)


class PagePool:
    """Hands out pages by number, lowest first, and takes them back. A page has one owner at a time."""

    def __init__(self, pages: int) -> None:
        """Errors: ValueError for fewer than 0 pages."""
        if pages < 0:
            raise ValueError(f"page pool: expected at least 0 pages, got {pages}")
        self.pages = pages
        self._free = list(range(pages))  # a heap

    @property
    def free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages, or ValueError if fewer are free or `count` is negative; then none is taken."""
        if not 0 <= count <= self.free:
            raise ValueError(f"page pool: {count} pages asked for, {self.free} of {self.pages} are free")
        return [heapq.heappop(self._free) for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Return pages to the pool, or ValueError if one of them is not out; then none is returned."""
        out = set(range(self.pages)) - set(self._free)
        if len(set(pages)) < len(pages) or not out.issuperset(pages):
            raise ValueError(f"page pool: expected pages that are out, each once, got {pages}")
        for page in pages:
            heapq.heappush(self._free, page)
