"""Local mode: every slot on every arm, each from the reference's carry and the reference's caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from audit import choices, forcing
from audit.arms import Arms, At, Run
from audit.measures import finite_rows, least_error, row_error, row_ulps
from audit.steps import VerifyStep
from audit.written import MANTISSA, head_error, head_least, raw_bytes, stray, written_rows
from mono.assembly import Assembly
from mono.caches import LayerCache
from mono.decode import StepOutput
from mono.formats import PtpcFp8
from mono.interface import Carry
from mono.layers import AnyWeights, dense_attention, dense_mlp, head, moe, sparse_attention
from mono.plan import Slot
from mono.reference.numerics import Numerics
from mono.reference.ops.top1 import top1
from mono.step import Step

BF16_MANTISSA = 7
EXACT = ("residual", "embedding")  # one rounded addition, or a copy: no order of sums can change them


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output of one slot on one step: the error of every row on every arm, against the oracle.

    output:   residual, embedding, partial, logits, k, v or index_k.
    errors:   by arm, [T] float64 over the rows that are no padding. NaN in a row of a floor arm that chose
              other blocks or experts than the oracle did, and so is no measure of noise.
    event:    [T], the error that one rounding inside the slot, decided the other way, may cost.
    behind:   [T], the fast arm's error against the oracle on the fast arm's own choice; its error where it
              chose as the oracle did.
    gap:      [T], how near a tie that choice was; 0 where the oracle's was made.
    noise:    largest difference of a score from the oracle's on any floor arm.
    experts:  [T, K] experts of each row, or None.
    unequal:  share of the fast arm's elements that are not the oracle's to the bit. ulps: the largest
              distance among them, along the output's own number line; -1 if any is not finite.
    """

    slot: int
    output: str
    errors: Mapping[str, Tensor]
    event: Tensor
    behind: Tensor
    gap: Tensor
    noise: float
    experts: Tensor | None = None
    unequal: float = 0.0
    ulps: int = 0


@dataclass(frozen=True, slots=True)
class Blemish:
    """Something that needs no floor to be wrong."""

    slot: int
    what: str
    row: int | None


@dataclass(frozen=True, slots=True)
class LocalWalk:
    """What a slot-by-slot walk saw, and the reference's own step."""

    comparisons: list[Comparison]
    blemishes: list[Blemish]
    output: StepOutput


def walk_slots(
    arms: Arms,
    step: VerifyStep,
    caches: Sequence[LayerCache],
    scratch: Sequence[LayerCache],
    taps: Sequence[int],
) -> LocalWalk:
    """Run every slot on every arm, each from the reference's carry and the reference's caches.

    Each arm writes into `scratch`, which is set back to `caches` before it; the reference runs last, into
    `caches` themselves. Slots that the fast assembly leaves on the reference arm are not compared.
    """
    comparisons: list[Comparison] = []
    blemishes: list[Blemish] = []
    plan = arms.reference.plan
    carry = arms.reference.start(step.step)
    streams: dict[int, Tensor] = {}
    for index, slot in enumerate(plan.slots):
        at = At(index, slot, min(max(slot.layer, 0), plan.layers - 1), carry, step)
        if arms.fast.sides[index] == "fast":
            runs, wrong = _run_all(arms, at, caches, scratch)
            blemishes += wrong + _not_finite(at, runs)
            comparisons += _compare(arms, at, runs, scratch[at.layer])
            carry = runs["reference"].carry
        else:
            carry = arms.reference.run_slot(index, carry, step.step, caches)
        if slot.kind in ("dense_attention", "sparse_attention", "head"):
            streams[slot.layer - 1] = carry.residual
    assert carry.logits is not None  # the plan ends in a head
    assert carry.top1 is not None
    tapped = torch.cat([streams[t] for t in taps], dim=1) if taps else carry.residual[:, :0]
    return LocalWalk(comparisons, blemishes, StepOutput(carry.logits, carry.top1, tapped))


def _run_all(
    arms: Arms, at: At, caches: Sequence[LayerCache], scratch: Sequence[LayerCache]
) -> tuple[dict[str, Run], list[Blemish]]:
    slot, step, layer = at.slot, at.step.step, at.layer
    attends = "attention" in slot.kind
    found: dict[str, Run] = {}
    blemishes: list[Blemish] = []
    for name, (assembly, numerics) in arms.by_name().items():
        into = caches if name == "reference" else scratch
        if attends and name != "reference":
            scratch[layer].copy_(caches[layer])
        if name != "fast":
            after = assembly.run_slot(at.index, at.carry, step, into)
        else:
            after, wrong = _run_in_parts(assembly, at, into)
            if attends:
                touched = stray(scratch[layer], caches[layer], step)
                wrong += [f"cache.{field} was written outside the step's slots" for field in touched]
            if isinstance(slot.spec, head.Spec) and not _true_top1(after, slot.spec.vocab, at.step.rows):
                wrong.append("top-1 is not the largest logit's lowest id")
            blemishes += [Blemish(at.index, what, None) for what in wrong]
        scores = None
        if numerics is not None:
            scores = _scores(slot, arms.weights[at.index], at.carry, step, into[layer], numerics)
        found[name] = Run(after, written_rows(into[layer], step) if attends else {}, scores)
    return found, blemishes


def _scores(
    slot: Slot, weights: AnyWeights, carry: Carry, step: Step, cache: LayerCache, numerics: Numerics
) -> Tensor | None:
    if isinstance(slot.spec, sparse_attention.Spec) and slot.spec.selects:
        assert isinstance(weights, sparse_attention.Weights)
        return choices.index_scores(slot.spec, weights, carry, step, cache, numerics)
    if isinstance(slot.spec, moe.Spec):
        assert isinstance(weights, moe.Weights)
        return choices.router_scores(slot.spec, weights, carry, numerics)
    return None


def _compare(arms: Arms, at: At, runs: Mapping[str, Run], scratch: LayerCache) -> Iterator[Comparison]:
    rows, slot, oracle = slice(0, at.step.rows), at.slot, runs["oracle"]
    none = torch.zeros(at.step.rows, dtype=torch.float64, device=at.carry.residual.device)
    choice: forcing.Choice | None = None
    if isinstance(slot.spec, sparse_attention.Spec) and slot.spec.selects:
        choice = forcing.selection(arms, at, runs, scratch, slot.spec)
    elif isinstance(slot.spec, moe.Spec):
        choice = forcing.experts(arms, at, runs, scratch, slot.spec)

    for name in ("residual", "partial", "logits"):
        values = {arm: getattr(run_.carry, name) for arm, run_ in runs.items()}
        if values["oracle"] is None or (name == "residual" and slot.kind == "embed"):
            continue
        want = values["oracle"][rows]
        errors = {arm: _error(value, want, rows) for arm, value in values.items() if arm != "oracle"}
        output = "embedding" if slot.kind == "embed" else name
        event = none if output in EXACT else _event(arms, at, output, want)
        behind, gap, noise, experts = errors["fast"], none, 0.0, None
        if choice is not None and output == "partial":
            for arm, tied in choice.tied.items():
                errors[arm] = torch.where(tied, float("nan"), errors[arm])
            behind = _error(values["fast"], choice.forced, rows)
            gap, noise, experts = choice.gap, choice.noise, choice.experts
        apart = _apart(values["fast"], want, rows)
        yield Comparison(at.index, output, errors, event, behind, gap, noise, experts, *apart)
    for name, want in oracle.written.items():
        errors = {arm: head_error(run_.written[name], want) for arm, run_ in runs.items() if arm != "oracle"}
        event = head_least(want, MANTISSA[scratch.k.dtype])
        apart = _apart(runs["fast"].written[name], want, rows)
        yield Comparison(at.index, name, errors, event, errors["fast"], none, 0.0, None, *apart)


def _apart(value: Tensor | None, want: Tensor, rows: slice) -> tuple[float, int]:
    """Share of elements that differ, and the largest distance in ulps; see `Comparison`."""
    if value is None or value[rows].shape != want.shape:
        return 1.0, -1
    got = value[rows]
    ulps = row_ulps(got, want)
    return float((got != want).double().mean()), -1 if bool((ulps < 0).any()) else int(ulps.max())


def _event(arms: Arms, at: At, output: str, want: Tensor) -> Tensor:
    """[T], what one rounding inside the slot may cost where a last bit decides it.

    Where a bf16 row is quantised to PTPC FP8, its largest element may fall one bf16 ulp away. That
    moves the row's scale by up to 2^-7, which re-rounds codes whose steps are at most 2^-3 of their value: a
    relative error of sqrt(2^-7 x 2^-3) = 2^-5. Where it is quantised to MXFP8 the scale is a power of two
    and stays; one code of average size moves by at most 2^-4 of itself, among F: 2^-4 / sqrt(F). The head
    reads a bf16 row of H: one element moves by 2^-8 of itself: 2^-8 / sqrt(H). Else the output's own.
    """
    weights, spec = arms.weights[at.index], at.slot.spec
    own = least_error(want, BF16_MANTISSA)
    if output == "logits":
        return torch.full_like(own, 2.0**-8 * arms.reference.hidden**-0.5)
    if isinstance(weights, dense_attention.Weights | sparse_attention.Weights):
        return own.clamp(min=2.0**-5) if isinstance(weights.o, PtpcFp8) else own
    if isinstance(weights, dense_mlp.Weights):
        return own.clamp(min=2.0**-5) if isinstance(weights.down, PtpcFp8) else own
    if isinstance(spec, moe.Spec) and spec.activations == "mxfp8":
        return own.clamp(min=2.0**-4 * spec.intermediate**-0.5)
    return own


def _error(value: Tensor | None, want: Tensor, rows: slice) -> Tensor:
    """Row errors; infinite if there is no tensor, or one of another shape."""
    if value is None or value[rows].shape != want.shape:
        return torch.full((len(want),), float("inf"), dtype=torch.float64, device=want.device)
    return row_error(value[rows], want)


def _run_in_parts(assembly: Assembly, at: At, caches: Sequence[LayerCache]) -> tuple[Carry, list[str]]:
    """The slot on the fast arm, part after part; and the fields of the carry that it wrote into.

    Each part gets a carry of its own: what the arm writes into it shows, and harms no other arm.
    """
    pieces: list[Carry] = []
    altered: list[str] = []
    for part in at.step.parts:
        padding = part.step.rows - part.rows
        start, stop = part.start, part.stop
        before = _each(at.carry, lambda x: _padded(x[start:stop], padding))  # noqa: B023  # called at once
        given = _each(before, torch.clone)
        after = assembly.run_slot(at.index, given, part.step, caches)
        altered += _altered(before, given)
        pieces.append(_each(after, lambda x: x[: stop - start]))  # noqa: B023
    together = {f.name: [getattr(piece, f.name) for piece in pieces] for f in fields(Carry)}
    whole = {
        name: None if any(x is None for x in values) else torch.cat(values)
        for name, values in together.items()
    }
    residual = whole.pop("residual")
    assert residual is not None  # a carry always has one
    return Carry(residual, **whole), [f"carry.{name} was altered in place" for name in dict.fromkeys(altered)]


def _padded(x: Tensor, rows: int) -> Tensor:
    return torch.cat([x, x.new_zeros(rows, *x.shape[1:])]) if rows else x


def _each(carry: Carry, change: Callable[[Tensor], Tensor]) -> Carry:
    values = {f.name: getattr(carry, f.name) for f in fields(carry)}
    return replace(carry, **{name: change(x) for name, x in values.items() if x is not None})


def _altered(before: Carry, after: Carry) -> list[str]:
    pairs = [(f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(before)]
    return [name for name, a, b in pairs if a is not None and not torch.equal(raw_bytes(a), raw_bytes(b))]


def _true_top1(carry: Carry, vocab: int, rows: int) -> bool:
    if carry.logits is None or carry.top1 is None:
        return False
    return torch.equal(carry.top1[:rows], top1(carry.logits[:rows], vocab))


def _not_finite(at: At, runs: Mapping[str, Run]) -> list[Blemish]:
    """Live rows of the fast arm, or of the reference, that hold a NaN or an infinity."""
    found = []
    for arm in ("fast", "reference"):
        for name in ("residual", "partial", "logits"):
            value = getattr(runs[arm].carry, name)
            if value is None:
                continue
            bad = ~finite_rows(value[: at.step.rows])
            if bool(bad.any()):
                row = int(bad.nonzero()[0])
                found.append(Blemish(at.index, f"{name} of the {arm} arm is not finite", row))
    return found
