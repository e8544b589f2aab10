"""What the kernels take, where several fast arms ask the same: sizes, formats, caches."""

from __future__ import annotations

from typing import TypeVar

import torch

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.formats import Matrix, Mxfp4, PtpcFp8

Format = TypeVar("Format", PtpcFp8, Mxfp4)


def refuse_sizes(head_dim: int, rotary_dim: int, group: int, block_size: int) -> str | None:
    """Why the attention kernels cannot take these sizes, or None."""
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        return f"head_dim is {head_dim}, the kernels take a power of two from 16 to 256"
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        return f"rotary_dim is {rotary_dim}, the kernels take an even number up to head_dim {head_dim}"
    if not 1 <= group <= 64:
        return f"{group} query heads share a KV head, the kernels take 1 to 64"
    if block_size & (block_size - 1) or not 16 <= block_size <= 256:
        return f"block_size is {block_size}, the kernels take a power of two from 16 to 256"
    return None


def refuse_formats(deployment: Deployment) -> str | None:
    """Why the attention kernels cannot read this deployment's caches or linears, or None."""
    if deployment.kv_format != "fp8_e4m3":
        return f"the KV cache is {deployment.kv_format}, the kernels read fp8_e4m3"
    if deployment.linears != "ptpc_fp8":
        return f"linears are {deployment.linears!r}, the fast attention multiplies in ptpc_fp8"
    return None


def in_format(where: str, matrix: Matrix, wanted: type[Format]) -> Format:
    """`matrix`, if it is stored in the format that the kernels read; ValueError, naming the field, if not."""
    if not isinstance(matrix, wanted):
        raise ValueError(f"{where}: expected {wanted.format_name}, got {matrix.format_name}")
    return matrix


def check_e4m3_cache(who: str, cache: LayerCache) -> None:
    """ValueError unless the cache is e4m3 and contiguous, as kernels read it."""
    for name in ("k", "v", "k_scale", "v_scale", "index_k"):
        tensor = getattr(cache, name)
        dtype = torch.float32 if name.endswith("scale") else torch.float8_e4m3fn
        if tensor is not None and (tensor.dtype != dtype or not tensor.is_contiguous()):
            raise ValueError(
                f"{who}: cache.{name}: expected contiguous {dtype}, "
                f"got {tensor.dtype} of strides {tensor.stride()}"
            )
