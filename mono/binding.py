"""Bind a loaded model to its fast arms, or say every reason why not: serving's only door to the fast path.

Three questions, in this order, and a later one is asked only when the earlier one has no reason against it:
may this deployment ever run fused; can this loaded model, layer by layer; does a certificate cover this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mono.assembly import Assembly, assemble, side_of
from mono.caches import LayerCache
from mono.certificate import LEAST_KEY, Certificate, CertificateError, read
from mono.decode import StepOutput, check_taps, run
from mono.deployment import Deployment
from mono.deployment_refusals import refuse_deployment
from mono.eligibility import Fused, Limits, StepMeta, eligible
from mono.facts import device_facts, facts_of
from mono.formats import e8m0
from mono.layers import AnyWeights, dense_mlp, sparse_attention
from mono.models import Model, architecture_of
from mono.plan import Plan, Slot
from mono.refusal import Declined, Refused
from mono.step import Step

ALIGNMENT = 16  # bytes; the widest load of a kernel

_DOOR = object()


@dataclass(frozen=True, slots=True)
class Bound:
    """A model that may decode on its fast arms. Only `bind` makes one.

    certificate:  what allows it. taps: decoder layers whose residual stream each step yields.
    limits:       what a step must fit. door: nobody has it but `bind`.
    """

    assembly: Assembly
    deployment: Deployment
    certificate: Certificate
    taps: tuple[int, ...]
    limits: Limits
    door: InitVar[object]

    def __post_init__(self, door: object) -> None:
        if door is not _DOOR:
            raise TypeError("Bound: only mono.bind makes one, with a certificate that covers the deployment")

    def eligible(self, meta: StepMeta) -> Fused | Declined:
        """May a step of these facts run here, and at which width?"""
        return eligible(meta, self.limits)

    def decode(self, step: Step, caches: Sequence[LayerCache]) -> StepOutput:
        """Run a step at its width, padded; logits, top-1 and taps of the rows it came with.

        caches:  one per decoder layer; the rows' keys are written into them.
        Errors:  ValueError for a step that is not eligible, before anything is launched.
        """
        decision = self.eligible(StepMeta.of(step))
        if isinstance(decision, Declined):
            raise ValueError(f"decode: the step was declined: {decision}")
        output = run(self.assembly, step.padded_to(decision.width), caches, self.taps)
        return StepOutput(*(x[: step.rows] for x in (output.logits, output.top1, output.taps)))


def bind(
    model: Model,
    deployment: Deployment,
    certificate: Certificate | str | Path | None,
    drafter_taps: Sequence[int] = (),
    key: bytes | None = None,
    device: torch.device | str | None = None,
    now: datetime | None = None,
    features: Mapping[str, object] | None = None,
) -> Bound | Refused:
    """Bind, or refuse with all reasons of the first question that has any.

    certificate:   one, or the path of one. Without it the answer is no, whatever the model.
    drafter_taps:  decoder layers whose residual stream the drafter reads, increasing; -1 is the embedding.
    key:           the operator's: the certificate must be signed with it.
    device:        where the weights are expected; wherever they are if None.
    now:           compared with the certificate's dates; the present if None.
    features:      what the engine has switched on (`refuse_deployment`).

    A refusal leaves nothing behind: weights are borrowed, no kernel is built, and the model is not touched.
    Errors:  ValueError for a `now` without a time zone and a key of fewer than 16 bytes.
    """
    now = datetime.now(UTC) if now is None else now
    if now.tzinfo is None:
        raise ValueError(f"bind: now: expected a date with a time zone, got {now}")
    if key is not None and len(key) < LEAST_KEY:
        raise ValueError(f"bind: key: expected at least {LEAST_KEY} bytes, got {len(key)}")

    architecture = architecture_of(model.checkpoint)
    if reasons := refuse_deployment(architecture, deployment, features or {}, model.config):
        return Refused(reasons)

    reasons = refuse_model(model, deployment, drafter_taps, device)
    try:
        assembly = assemble(model.plan, model.weights, deployment, "fast")
    except ValueError as error:  # a weight that is missing, or of another dtype or shape
        return Refused((*reasons, str(error)))
    if isinstance(assembly, Refused):
        return Refused((*reasons, *_once(assembly.reasons)))
    if reasons:
        return Refused(reasons)

    try:
        if certificate is None:
            raise CertificateError("none was given, and nothing runs fused without one")
        if isinstance(certificate, str | Path):
            certificate = read(certificate)
        if type(certificate) is not Certificate:  # nor a subclass, which may say of itself what it likes
            raise CertificateError(f"expected a certificate or its path, got {type(certificate).__name__}")
        if why := certificate.unsigned(key) or certificate.covers(facts_of(model, assembly, deployment), now):
            raise CertificateError(why)
    except (CertificateError, OSError) as error:
        return Refused((f"certificate: {error}",))
    limits = Limits.of(deployment, model.config.block_size)
    return Bound(assembly, deployment, certificate, tuple(drafter_taps), limits, _DOOR)


def refuse_model(
    model: Model, deployment: Deployment, taps: Sequence[int], device: torch.device | str | None
) -> tuple[str, ...]:
    """Every reason against this loaded model that no single arm can know, in this order.

    How it was loaded, the device, the taps, the layer stack, and each slot's weights.
    """
    reasons = []
    for name in ("tp_size", "linears", "expert_activations", "shared_expert"):
        loaded, asked = getattr(model.deployment, name), getattr(deployment, name)
        if loaded != asked:
            reasons.append(f"model: was loaded with {name} {loaded!r}, the deployment has {asked!r}")
    found = _tensors(model.weights[0])[0][1].device
    if device is not None and _indexed(torch.device(device)) != _indexed(found):
        reasons.append(f"device: expected the weights on {device}, they are on {found}")
    if why := refuse_device(found):
        reasons.append(why)
    try:
        check_taps(taps, model.plan.layers)
    except ValueError as error:
        reasons.append(str(error))
    reasons += refuse_stack(model.plan, deployment)
    for slot, weights in zip(model.plan.slots, model.weights, strict=False):  # assemble counts them
        reasons += _refuse_weights(slot, weights, found)
    return tuple(reasons)


def refuse_device(device: torch.device) -> str | None:
    """Why no kernel is built for this device, or None. A CPU interprets."""
    from mono.fast.targets import SUPPORTED

    name, capability = device_facts(device)
    if device.type == "cpu" or capability in SUPPORTED:
        return None
    return f"device: {name} ({capability}): kernels are built for {', '.join(SUPPORTED)}"


def refuse_stack(plan: Plan, deployment: Deployment) -> list[str]:
    """Reasons that need the whole stack of layers, each naming its layer.

    Prefix:       dense-MLP layers before the first MoE layer, at least one, with one kind of attention. After
                  it every layer is sparse attention and MoE.
    Selection:    the first sparse layer that runs fast picks its own KV blocks: what original modules picked
                  before it is not handed on.
    SwiGLU:       dense layers that run fast share one (alpha, beta, limit). Those of a prefix on the original
                  modules are not looked at.
    """
    reasons = []
    attention, mlp = plan.slots[1:-1:2], plan.slots[2:-1:2]
    prefix = plan.prefix
    if prefix == 0:
        reasons.append("layer 0: expected a dense-MLP prefix before the MoE layers, got moe")
    if prefix == plan.layers:
        reasons.append(f"layer {prefix - 1}: expected MoE layers after the dense-MLP prefix, there are none")
    reasons += [
        f"layer {slot.layer}: a mixed prefix: expected {attention[0].kind}, as layer 0, got {slot.kind}"
        for slot in attention[1:prefix]
        if slot.kind != attention[0].kind
    ]
    for a, m in zip(attention[prefix:], mlp[prefix:], strict=True):
        if (a.kind, m.kind) != ("sparse_attention", "moe"):
            reasons.append(f"layer {a.layer}: expected sparse_attention and moe, got {a.kind} and {m.kind}")

    fast = [slot for slot in plan.slots if side_of(plan, slot, deployment, "fast") == "fast"]
    first = next((slot for slot in fast if isinstance(slot.spec, sparse_attention.Spec)), None)
    if first is not None and isinstance(first.spec, sparse_attention.Spec) and not first.spec.selects:
        reasons.append(
            f"layer {first.layer}: reuses a selection, and it is the first fused sparse layer, which must"
            " select its own KV blocks (index_topk_freq)"
        )
    dense = [(slot, s.alpha, s.beta, s.limit) for slot in fast if isinstance(s := slot.spec, dense_mlp.Spec)]
    for slot, *swiglu in dense[1:]:
        if swiglu != list(dense[0][1:]):
            reasons.append(
                f"{slot}: expected SwiGLU (alpha, beta, limit) {dense[0][1:]}, as layer {dense[0][0].layer},"
                f" got {tuple(swiglu)}"
            )
    return reasons


def _refuse_weights(slot: Slot, weights: AnyWeights, device: torch.device) -> list[str]:
    """Tensors of this slot on another device, with gaps, off their alignment, or scales that cannot be meant.

    Arms check dtypes and shapes.
    """
    reasons = []
    for name, tensor in _tensors(weights):
        if tensor.device != device:
            reasons.append(f"{slot}: {name}: expected it on {device}, it is on {tensor.device}")
        if not tensor.is_contiguous():
            reasons.append(f"{slot}: {name}: expected contiguous rows, got strides {tensor.stride()}")
        elif tensor.numel() > 1 and tensor.data_ptr() % ALIGNMENT:
            reasons.append(f"{slot}: {name}: expected an address of whole {ALIGNMENT} bytes")
        if name.endswith(".scale") and tensor.device == device and (count := _wrong_scales(tensor)):
            reasons.append(f"{slot}: {name}: expected finite positive scales, got {count} other")
    return reasons


def _wrong_scales(scale: Tensor) -> int:
    """E8M0 bytes that are NaN, and fp32 scales that are not finite and positive. NVFP4's may be zero."""
    if scale.dtype == torch.uint8:
        return int((scale == e8m0.NAN).sum())
    if scale.dtype == torch.float32:
        return int((~((scale > 0) & scale.isfinite())).sum())
    return 0


def _tensors(weights: AnyWeights) -> list[tuple[str, Tensor]]:
    """Every tensor of a slot's weights, parts of a matrix as `matrix.part`."""
    found: list[tuple[str, Tensor]] = []
    for field in fields(weights):
        value: Any = getattr(weights, field.name)
        if isinstance(value, Tensor):
            found.append((field.name, value))
        elif value is not None:
            parts = ((f"{field.name}.{part.name}", getattr(value, part.name)) for part in fields(value))
            found += [(name, part) for name, part in parts if isinstance(part, Tensor)]
    return found


def _indexed(device: torch.device) -> torch.device:
    """`cuda` means the current one."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _once(reasons: Sequence[str]) -> list[str]:
    """Reasons that differ only in their layer become one that names the first."""
    places: dict[str, list[str]] = {}
    for reason in reasons:
        place, _, why = reason.partition(": ")
        places.setdefault(why, []).append(place)
    return [
        f"{first}: {why}" + (f" (and {len(others)} other slots)" if others else "")
        for why, (first, *others) in places.items()
    ]
