"""Checks that both arms of a layer type share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from mono.caches import LayerCache
from mono.interface import LayerType
from mono.layers import dense_attention, sparse_attention
from mono.parallel import Comm


def check_weights(layer_type: LayerType[Any, Any], spec: Any, weights: Any, comm: Comm) -> None:
    """ValueError naming the field, if a weight is missing, of another kind, dtype or shape, or elsewhere."""
    shapes: Mapping[str, tuple[int, ...] | None] = layer_type.shapes(spec)
    devices: dict[str, str] = {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        want = local_shape(shapes[field.name], layer_type.cuts[field.name], comm.size)
        if (value is None) != (want is None):
            raise ValueError(
                f"{layer_type.name}.{field.name}: expected {_words(want)}, got {_words(shape_of(value))}"
            )
        if value is None or want is None:
            continue
        wanted_kind = layer_type.dtypes.get(field.name, "a stored matrix")
        kind = value.dtype if isinstance(value, Tensor) else "a stored matrix"
        if kind != wanted_kind:
            raise ValueError(f"{layer_type.name}.{field.name}: expected {wanted_kind}, got {kind}")
        got = shape_of(value) or ()
        if len(got) != len(want) or any(w not in (g, -1) for g, w in zip(got, want, strict=True)):
            raise ValueError(f"{layer_type.name}.{field.name}: expected {_words(want)}, got {_words(got)}")
        devices[field.name] = str(value.device)
    if len(set(devices.values())) > 1:
        raise ValueError(f"{layer_type.name}: weights lie on several devices: {devices}")


def check_cache(who: str, spec: dense_attention.Spec | sparse_attention.Spec, cache: LayerCache) -> None:
    """ValueError naming the field, unless a cache has the sizes of this attention layer."""
    page = (cache.pages, spec.block_size)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("k", "v"), (*page, spec.kv_heads, spec.head_dim)),
        **dict.fromkeys(("k_scale", "v_scale"), (*page, spec.kv_heads)),
    }
    if isinstance(spec, sparse_attention.Spec) and spec.selects:
        shapes["index_k"] = (*page, spec.index_dim)
    for name, want in shapes.items():
        got = shape_of(getattr(cache, name))
        if got != want:
            raise ValueError(f"{who}: cache.{name}: expected {_words(want)}, got {_words(got)}")


def local_shape(shape: tuple[int, ...] | None, cut: str, ranks: int) -> tuple[int, ...] | None:
    """The shape one rank holds of a weight of `shape` under `cut`. Uncut when there is one rank."""
    if shape is None or ranks == 1 or cut == "replicated":
        return shape
    raise NotImplementedError(f"tensor parallel cut {cut!r} over {ranks} ranks")


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The logical shape of a tensor or a quantised matrix."""
    return None if value is None else tuple(value.shape)


def _words(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(list(shape))
