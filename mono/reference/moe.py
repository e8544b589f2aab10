"""Mixture of experts, in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mono.caches import LayerCache
from mono.deployment import Deployment
from mono.formats import Matrix
from mono.interface import Carry, Layer
from mono.layers.checks import check_weights
from mono.layers.moe import TYPE, Spec, Weights
from mono.parallel import Comm
from mono.reference.numerics import NATIVE, Numerics
from mono.reference.ops.linear import linear, rounded
from mono.reference.ops.rms_norm import absorb, gemma_rms_norm
from mono.reference.ops.router import route
from mono.reference.ops.swiglu import swiglu_oai
from mono.step import Step

_SMALL_TABLE = 1 << 22  # values of an expert table that is kept decoded, 16 MiB


def refuse(spec: Spec, deployment: Deployment) -> str | None:
    """The reference serves every MoE layer."""
    return None


def build(spec: Spec, weights: Weights, comm: Comm, numerics: Numerics = NATIVE) -> Layer:
    """Keep the weights as they are stored, and decode an expert when a row has chosen it; small tables once.

        out = sum_k w_k E_k(x) + S(x),  E(x) = down swiglu(gate_up x)

    Rounding, in order: residual to bf16; norm output to bf16; that to MXFP8 for the experts where the
    deployment says so; SwiGLU to bf16, likewise; each expert's output stays fp32, is multiplied by its
    weight, and the slots are summed in fp32; the sum to bf16.
    """
    check_weights(TYPE, spec, weights, comm)

    gate_up, down = _decoder(weights.gate_up), _decoder(weights.down)

    def shared(x: Tensor, gate_up: Matrix, down: Matrix) -> Tensor:
        h = linear(x, gate_up, numerics, spec.activations)
        mid = swiglu_oai(h, spec.alpha, spec.beta, spec.limit).bfloat16()
        return linear(mid, down, numerics, spec.activations)

    def moe(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        total = absorb(carry, comm)  # [T, H] fp32
        x = gemma_rms_norm(total, weights.norm, spec.eps, numerics).bfloat16()  # of the unrounded sum
        ids, weight = route(x, weights.router, weights.bias, spec.topk, spec.scaling, numerics)  # [T, K]
        if spec.shared == "fused":
            ids = torch.nn.functional.pad(ids, (0, 1), value=spec.experts)
            weight = torch.nn.functional.pad(weight, (0, 1), value=1.0)
        ids = torch.where(step.live[:, None], ids, -1)  # a padding row is no expert's work

        # from here to the sum a row is one slot of a token: R = T x slots rows
        groups = _rows_by_expert(ids.flatten(), spec.table)
        a = rounded(x, weights.gate_up, spec.activations).repeat_interleave(spec.slots, dim=0)
        h = _product(a, groups, gate_up, weights.gate_up.shape[1], numerics)  # [R, 2 F] fp32
        mid = swiglu_oai(h, spec.alpha, spec.beta, spec.limit).bfloat16()  # [R, F]
        b = rounded(mid, weights.down, spec.activations)
        y = _product(b, groups, down, spec.hidden, numerics)  # [R, H] fp32
        y = y.view(step.rows, spec.slots, spec.hidden) * weight.unsqueeze(-1)
        out = numerics.sum(y, 1)  # [T, H]
        if weights.shared_gate_up is not None and weights.shared_down is not None:
            out = out + shared(x, weights.shared_gate_up, weights.shared_down)
        return replace(carry, residual=total.bfloat16(), partial=out.bfloat16())

    return moe


def _rows_by_expert(experts: Tensor, table: int) -> list[tuple[int, Tensor]]:
    """Each expert that has rows, with their numbers, from each row's expert; -1 belongs to none."""
    order = experts.argsort(stable=True)
    sizes = torch.bincount(experts + 1, minlength=table + 1).tolist()
    parts = order.split(sizes)
    return [(e, rows) for e, rows in enumerate(parts[1:]) if len(rows)]


def _product(
    a: Tensor,
    groups: list[tuple[int, Tensor]],
    matrix: Callable[[int], Tensor],
    width: int,
    numerics: Numerics,
) -> Tensor:
    """Each row of `a` [R, K] times its own expert's matrix [width, K]; zeros for a row without one."""
    out = a.new_zeros(a.shape[0], width)
    for e, rows in groups:
        out[rows] = numerics.matmul(a[rows], matrix(e))
    return out


def _decoder(table: Matrix) -> Callable[[int], Tensor]:
    """Expert e's matrix as fp32."""
    if table.shape.numel() <= _SMALL_TABLE:
        return table.dequantise().__getitem__
    return lambda e: table[e].dequantise()
