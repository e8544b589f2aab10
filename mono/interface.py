"""The one interface every layer type and both of its arms share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mono.caches import LayerCache
    from mono.deployment import Deployment
    from mono.parallel import Comm
    from mono.step import Step

Spec = TypeVar("Spec")
Weights = TypeVar("Weights")
SpecContra = TypeVar("SpecContra", contravariant=True)
WeightsContra = TypeVar("WeightsContra", contravariant=True)

Side = Literal["reference", "fast"]
Cut = Literal["replicated", "rows", "columns", "heads", "vocabulary", "expert rows", "expert columns"]


@dataclass(frozen=True, slots=True)
class Carry:
    """What one slot hands to the next within a decode step.

    residual:  [T, H] bf16, the residual stream; the same on every rank.
    partial:   [T, H] bf16, this rank's share of the last slot's output, not yet summed over the
               ranks and not yet in the residual. None before the first slot.
    selected:  [T, G, S] int32, the KV blocks each row attends to, ascending, -1 past the last.
               None until a slot selects.
    logits:    [T, V] fp32, padded vocabulary columns included. None until the head.
    top1:      [T] int64, the largest true-vocabulary logit's token, lowest id on a tie. None until
               the head.

    A slot never writes into a tensor it was handed; it returns new ones. So a tap after decoder
    layer k is simply the `residual` that the next slot of layer k + 1 (or the head) hands on.
    """

    residual: Tensor
    partial: Tensor | None = None
    selected: Tensor | None = None
    logits: Tensor | None = None
    top1: Tensor | None = None

    @staticmethod
    def start(rows: int, hidden: int, device: torch.device) -> Carry:
        """The carry before the first slot: an empty residual stream."""
        return Carry(torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device))


class Layer(Protocol):
    """One built slot: weights laid out, sizes fixed, ready to run any step."""

    def __call__(self, carry: Carry, step: Step, cache: LayerCache) -> Carry:
        """Run the slot. `cache` is its decoder layer's own; only attention reads and writes it."""
        ...


class Arm(Protocol[SpecContra, WeightsContra]):
    """What `mono/reference/<name>.py` and `mono/fast/<name>.py` both provide, as modules."""

    def refuse(self, spec: SpecContra, deployment: Deployment) -> str | None:
        """None if this arm serves `spec`, otherwise why not, in words the reader can act on."""
        ...

    def build(self, spec: SpecContra, weights: WeightsContra, comm: Comm) -> Layer:
        """Lay out the weights, once. ValueError on a spec that `refuse` turns down."""
        ...


@dataclass(frozen=True)
class LayerType(Generic[Spec, Weights]):
    """A layer type's contract: its name in every room, its sizes, its weights.

    shapes:  the whole (uncut) logical shape of every field of Weights, from a Spec. None where the
             spec leaves the field out.
    cuts:    how tensor parallelism cuts each field.
    dtypes:  the dtype of every field that is a plain tensor; the others are matrices in any stored format.
    """

    name: str
    spec: type[Spec]
    weights: type[Weights]
    shapes: Callable[[Any], Mapping[str, tuple[int, ...] | None]]
    cuts: Mapping[str, Cut]
    dtypes: Mapping[str, torch.dtype]
