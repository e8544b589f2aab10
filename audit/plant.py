"""Faults to plant in a copy of the fast arm, to see whether the audit finds them, and in the right place.

A fault of the weights gives one slot altered weights; a fault of arithmetic wraps or rebuilds one slot's
layer; a fault of the surroundings alters the taps or the candidate's own past. The checkpoint, the reference
and the fast arm's own code stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from audit.steps import History, VerifyStep
from audit.whole import Candidate
from mono import fast
from mono.assembly import Assembly
from mono.caches import LayerCache
from mono.decode import StepOutput
from mono.fast.ops.experts import experts
from mono.fast.ops.rms_norm import absorb_norm_bf16, absorb_norm_mxfp8
from mono.fast.ops.router import route
from mono.formats import Mxfp4
from mono.interface import Carry, Layer
from mono.layers import AnyWeights, dense_attention, moe, sparse_attention
from mono.parallel import SOLO
from mono.step import Step

Plant = Callable[[Candidate, Sequence[AnyWeights]], Candidate]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and where the audit has to name it.

    place: how the reason must begin: the slot's name, or the mode and tap.
    """

    name: str
    place: str
    plant: Plant


def with_layer(candidate: Candidate, index: int, layer: Layer) -> Candidate:
    """The candidate with one slot's layer replaced."""
    assembly = candidate.assembly
    layers = (*assembly.layers[:index], layer, *assembly.layers[index + 1 :])
    return replace(candidate, assembly=replace(assembly, layers=layers))


def with_weights(candidate: Candidate, index: int, weights: AnyWeights, **spec: Any) -> Candidate:
    """The candidate with one slot built anew, from other weights or other constants of its spec."""
    slot = candidate.assembly.plan.slots[index]
    arm: Any = fast.ARMS[slot.kind]
    return with_layer(candidate, index, arm.build(replace(slot.spec, **spec), weights, SOLO))


def index_of(assembly: Assembly, place: str) -> int:
    """Number of the slot called `place`."""
    return [str(slot) for slot in assembly.plan.slots].index(place)


def nibbles_swapped(layer: int, expert: int) -> Fault:
    """One expert's packed codes with the high nibble first."""

    def swap(packed: Tensor) -> None:
        packed[expert] = (packed[expert] << 4) | (packed[expert] >> 4)

    return _expert_fault(f"nibbles of expert {expert} swapped", layer, lambda matrix: swap(matrix.packed))


def scale_byte_off(layer: int, expert: int, by: int = 1) -> Fault:
    """One byte of one expert's block scales off, in the down projection: 32 weights of one output doubled.

    The largest scale is taken; a fault among the smallest is below every floor, and changes no text.
    """

    def shift(scale: Tensor) -> None:
        at = int(scale[expert].flatten().int().argmax())
        scale[expert].view(-1)[at] += by

    return _expert_fault(
        f"a scale byte of expert {expert} off by {by}", layer, lambda matrix: shift(matrix.scale), "down"
    )


def _expert_fault(name: str, layer: int, change: Callable[[Mxfp4], None], which: str = "gate_up") -> Fault:
    place = f"layer {layer} (moe)"

    def plant(candidate: Candidate, weights: Sequence[AnyWeights]) -> Candidate:
        index = index_of(candidate.assembly, place)
        own = weights[index]
        matrix = getattr(own, which)
        copy = Mxfp4(matrix.packed.clone(), matrix.scale.clone())
        change(copy)
        return with_weights(candidate, index, replace(own, **{which: copy}))  # type: ignore[arg-type]

    return Fault(name, place, plant)


def clamp_dropped(layer: int) -> Fault:
    """SwiGLU without its limit."""
    place = f"layer {layer} (moe)"

    def plant(candidate: Candidate, weights: Sequence[AnyWeights]) -> Candidate:
        index = index_of(candidate.assembly, place)
        return with_weights(candidate, index, weights[index], limit=1e9)

    return Fault("SwiGLU clamp dropped", place, plant)


def rope_off_by_one(place: str) -> Fault:
    """Every position turned by its successor's angle."""

    def plant(candidate: Candidate, weights: Sequence[AnyWeights]) -> Candidate:
        index = index_of(candidate.assembly, place)
        own = weights[index]
        assert isinstance(own, dense_attention.Weights | sparse_attention.Weights)
        ahead = torch.cat([own.rope[1:], own.rope[-1:]])
        return with_weights(candidate, index, replace(own, rope=ahead))

    return Fault("RoPE position off by one", place, plant)


def last_key_masked(place: str) -> Fault:
    """Every row blind to its own key, the last of the tail block."""

    def plant(candidate: Candidate, weights: Sequence[AnyWeights]) -> Candidate:
        index = index_of(candidate.assembly, place)
        layer = candidate.assembly.layers[index]

        def blind(carry: Carry, step: Step, cache: LayerCache) -> Carry:
            visible = (step.visible - 1).clamp(min=0)
            return layer(carry, replace(step, visible=visible), cache)

        return with_layer(candidate, index, blind)

    return Fault("last key of the tail block masked", place, plant)


def tap_early(tap: int) -> Fault:
    """One tap taken a decoder layer too early."""

    def plant(candidate: Candidate, weights: Sequence[AnyWeights]) -> Candidate:
        taps = candidate.taps
        if taps is None or tap not in taps or tap - 1 in taps:
            raise ValueError(f"tap_early: expected a candidate that taps {tap} and not {tap - 1}, got {taps}")
        return replace(candidate, taps=tuple(t - (t == tap) for t in taps))

    return Fault(f"tap {tap} taken one layer early", f"shadow: tap after layer {tap}", plant)


def bias_weighs(layer: int) -> Fault:
    """The router's correction bias inside the weights that it must only choose for."""
    place = f"layer {layer} (moe)"

    def plant(candidate: Candidate, weights: Sequence[AnyWeights]) -> Candidate:
        index = index_of(candidate.assembly, place)
        own, spec = weights[index], candidate.assembly.plan.slots[index].spec
        assert isinstance(own, moe.Weights)
        assert isinstance(spec, moe.Spec)
        return with_layer(candidate, index, _biased_moe(spec, own))

    return Fault("correction bias used as weight", place, plant)


def _biased_moe(spec: moe.Spec, weights: moe.Weights) -> Layer:
    """`mono.fast.moe` with each expert weighed by score + bias, the weights renormalised as before."""
    gate_up, down = weights.gate_up, weights.down
    assert isinstance(gate_up, Mxfp4)
    assert isinstance(down, Mxfp4)
    shared, mxfp8 = spec.shared == "fused", spec.activations == "mxfp8"

    def layer(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        if mxfp8:
            residual, x, rows = absorb_norm_mxfp8(carry.residual, carry.partial, weights.norm, spec.eps)
        else:
            residual, x = absorb_norm_bf16(carry.residual, carry.partial, weights.norm, spec.eps)
            rows = x
        ids, weight, slot_of = route(
            x, weights.router, weights.bias, spec.topk, spec.scaling, step.slots, shared
        )
        score = torch.sigmoid(x.float() @ weights.router.mT) + weights.bias
        routed = score.gather(1, ids[:, : spec.topk].long().clamp(min=0))
        weight[:, : spec.topk] = routed / routed.sum(dim=1, keepdim=True) * spec.scaling
        out = experts(rows, gate_up, down, ids, slot_of, weight, spec.alpha, spec.beta, spec.limit, mxfp8)
        return replace(carry, residual=residual, partial=out)

    return layer


@dataclass
class KeepingHistory(History):
    """A past in which the token that replaces a rejected draft never overwrites its key and value."""

    last: tuple[VerifyStep, tuple[int, ...]] | None = field(default=None)

    def run(self, step: VerifyStep) -> StepOutput:
        """The step, after which the slots of rejected drafts hold again what they held before."""
        kept = [] if self.last is None else _stale(*self.last)
        slots = step.step.slots
        stale = torch.tensor(sorted(set(kept) & set(slots.tolist())), device=slots.device)
        before = [_rows(cache, stale.long()) for cache in self.caches]
        output = super().run(step)
        for cache, rows in zip(self.caches, before, strict=True):
            for values, saved in zip(_bytes(cache), rows, strict=True):
                values[stale.long()] = saved
        return output

    def keep(self, taps: Tensor, step: VerifyStep, accepted: Sequence[int]) -> None:
        """As before, and remember which rows were rejected."""
        super().keep(taps, step, accepted)
        self.last = step, tuple(accepted)


def rejected_key_kept(place: str) -> Fault:
    """The candidate's own caches keep the keys of rejected drafts. Named at the first attention slot."""

    def plant(candidate: Candidate, weights: Sequence[AnyWeights]) -> Candidate:
        return replace(candidate, history=KeepingHistory)

    return Fault("a rejected draft's key kept", f"{place}: own cache", plant)


def _stale(step: VerifyStep, accepted: Sequence[int]) -> list[int]:
    q = step.step.q_len
    slots = step.step.slots.tolist()
    return [slots[r * q + j] for r, a in enumerate(accepted) for j in range(a + 1, q)]


def _bytes(cache: LayerCache) -> list[Tensor]:
    """Every field of a cache as [slots, bytes], views: torch does not index fp8."""
    fields_ = (cache.k, cache.v, cache.k_scale, cache.v_scale, cache.index_k)
    return [x.flatten(0, 1).flatten(1).view(torch.uint8) for x in fields_ if x is not None]


def _rows(cache: LayerCache, slots: Tensor) -> list[Tensor]:
    return [values[slots].clone() for values in _bytes(cache)]


def eight_faults(assembly: Assembly, taps: Sequence[int]) -> list[Fault]:
    """One fault of each of eight kinds, in slots that this assembly runs on the fast arm."""
    on_fast = [str(s) for s, side in zip(assembly.plan.slots, assembly.sides, strict=True) if side == "fast"]
    attention = next(place for place in on_fast if "attention" in place)
    layer = next(s.layer for s in assembly.plan.slots if str(s) in on_fast and s.kind == "moe")
    tap = next(t for t in taps if t - 1 not in taps and t > assembly.plan.prefix)
    first = str(assembly.plan.slots[1])
    return [
        nibbles_swapped(layer, 3),
        scale_byte_off(layer, 5),
        clamp_dropped(layer),
        rope_off_by_one(attention),
        last_key_masked(attention),
        tap_early(tap),
        bias_weighs(layer),
        rejected_key_kept(first),
    ]
