"""What a step wrote into the caches: the values that its slots hold, and what it had no business to touch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from audit.measures import least_error, row_error
from mono.caches import LayerCache
from mono.formats import kv_fp8
from mono.step import Step

MANTISSA = {torch.float8_e4m3fn: 3, torch.bfloat16: 7}


def written_rows(cache: LayerCache, step: Step) -> dict[str, Tensor]:
    """The values that the live rows of `step` hold in a cache: k and v [T, G, D], index_k [T, 1, I], fp32."""
    at = step.slots[step.live]
    return cache_rows(cache, at)


def cache_rows(cache: LayerCache, slots: Tensor) -> dict[str, Tensor]:
    """The values at cache slots, decoded: k and v [n, G, D], index_k [n, 1, I], fp32."""

    def rows(values: Tensor) -> Tensor:
        if values.dtype == torch.float8_e4m3fn:  # torch does not index fp8
            return values.view(torch.uint8).flatten(0, 1)[slots].view(torch.float8_e4m3fn)
        return values.flatten(0, 1)[slots]

    def decoded(values: Tensor, scale: Tensor) -> Tensor:
        stored, factor = rows(values), scale.flatten(0, 1)[slots]
        if stored.dtype == torch.float8_e4m3fn:
            return kv_fp8.dequantise(stored, factor)
        return stored.float() * factor.unsqueeze(-1)

    found = {"k": decoded(cache.k, cache.k_scale), "v": decoded(cache.v, cache.v_scale)}
    if cache.index_k is not None:
        found["index_k"] = rows(cache.index_k).float().unsqueeze(1)
    return found


def head_error(got: Tensor, want: Tensor) -> Tensor:
    """[T] error of the worst head of each row, for [T, G, D]."""
    T, G = want.shape[:2]
    return row_error(got.flatten(0, 1), want.flatten(0, 1)).view(T, G).amax(dim=1)


def head_least(want: Tensor, mantissa: int) -> Tensor:
    """[T]: the error of one rounding of a head's largest element, for [T, G, D] of `mantissa` bits."""
    T, G = want.shape[:2]
    return least_error(want.flatten(0, 1), mantissa).view(T, G).amax(dim=1)


def poisoned(caches: Sequence[LayerCache], step: Step) -> None:
    """Fill the slots that `step` is about to write with NaN: an arm that reads one first, or leaves one
    unwritten, cannot stay unnoticed."""
    at = step.slots[step.live]
    for cache in caches:
        for values in (cache.k, cache.v, cache.index_k):
            if values is not None and values.dtype == torch.float8_e4m3fn:
                values.view(torch.uint8).flatten(0, 1)[at] = 0x7F
            elif values is not None:
                values.flatten(0, 1)[at] = float("nan")
        for scales in (cache.k_scale, cache.v_scale):
            scales.flatten(0, 1)[at] = float("nan")


def stray(after: LayerCache, before: LayerCache, step: Step) -> list[str]:
    """Fields of a cache that differ outside the slots that `step` writes."""
    changed = []
    for field in fields(after):
        a, b = getattr(after, field.name), getattr(before, field.name)
        if a is None:
            continue
        differs = (raw_bytes(a) != raw_bytes(b)).flatten(0, 1).flatten(1).any(dim=1)
        differs[step.slots[step.live]] = False
        if bool(differs.any()):
            changed.append(field.name)
    return changed


def raw_bytes(x: Tensor) -> Tensor:
    """The bytes of a tensor: NaN and -0 compare like anything else."""
    return x.contiguous().view(torch.uint8)
