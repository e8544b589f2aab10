"""Weights, caches and runs that the two attention layer types' tests share."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from mono.caches import LayerCache
from mono.formats import PtpcFp8, ptpc_fp8
from mono.interface import Carry, LayerType
from mono.parallel import SOLO
from mono.reference.ops.rope import rope_table
from mono.step import Step


def random_weights(layer_type: LayerType, spec: Any, seed: int = 0) -> Any:
    """Weights of a layer in PTPC FP8 whose outputs are of the size of its inputs."""
    rng = torch.Generator().manual_seed(seed)
    made: dict[str, Any] = {}
    for name, shape in layer_type.shapes(spec).items():
        if name == "rope":
            made[name] = rope_table(4096, spec.rotary_dim, 1e4)
        elif len(shape) == 2:
            made[name] = ptpc_fp8.quantise_weight(torch.randn(shape, generator=rng) * shape[1] ** -0.5)
        else:
            made[name] = (torch.randn(shape, generator=rng) * 0.2).bfloat16()
    return layer_type.weights(**made)


def moved(weights: Any, device: torch.device) -> Any:
    """The same weights on another device."""
    return type(weights)(**{f.name: getattr(weights, f.name).to(device) for f in fields(weights)})


def random_carry(spec: Any, rows: int, seed: int = 1) -> Carry:
    """A residual stream and a last slot's output."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, rows, spec.hidden, generator=rng).bfloat16()
    return Carry(residual=x[0], partial=x[1])


def on(carry: Carry, device: torch.device) -> Carry:
    """The carry on another device."""
    return Carry(
        **{f.name: None if (x := getattr(carry, f.name)) is None else x.to(device) for f in fields(carry)}
    )


def run(
    arm: Any, spec: Any, weights: Any, carry: Carry, step: Step, cache: LayerCache, device: torch.device
) -> tuple[Carry, LayerCache]:
    """One slot on `device`: the carry it hands on and the cache it leaves, on the CPU unless on `meta`."""
    back = device if device.type == "meta" else torch.device("cpu")
    cache = LayerCache(*(None if x is None else x.to(device, copy=True) for x in cache._tensors()))
    layer = arm.build(spec, moved(weights, device), SOLO)
    out = layer(on(carry, device), step.to(device), cache)
    return on(out, back), LayerCache(*(None if x is None else x.to(back) for x in cache._tensors()))


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """[T], distance of each row from what it should be, relative to its length."""
    apart = (got.double() - want.double()).norm(dim=1)
    return apart / want.double().norm(dim=1).clamp(min=1e-9)


def not_ptpc(matrix: PtpcFp8) -> Any:
    """The same matrix as bf16."""
    from mono.formats import Bf16

    return Bf16(matrix.dequantise().bfloat16())
