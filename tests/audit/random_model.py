"""A random model of every layer type, small enough to audit in a second, and arms to audit on it.

The candidate here is the reference under one more order of sums: as legal as a fast arm can be. A faulty one
is the same with altered weights, or a wrapped layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from audit.evidence import MODES, Evidence, Mode, Subject, gather
from audit.steps import Prompt, Schedule
from audit.whole import Candidate
from mono.assembly import Assembly, assemble
from mono.deployment import Deployment
from mono.dspark.drafter import Proposal
from mono.formats import mxfp4, ptpc_fp8
from mono.layers import dense_attention, dense_mlp, embed, head, moe, sparse_attention
from mono.plan import Plan, Slot
from mono.reference.numerics import reordered
from mono.reference.ops.rope import rope_table

H, HEADS, KV_HEADS, D, ROTARY, BLOCK, EPS = 64, 4, 2, 32, 16, 8, 1e-6
VOCAB, PADDED, POSITIONS, EXPERTS, F = 4, 8, 512, 6, 32
SWIGLU = {"alpha": 1.702, "beta": 1.0, "limit": 3.0}
TAPS = (0, 2)
DEPLOYMENT = Deployment(max_context=POSITIONS - 8)


def random_model(seed: int = 0) -> tuple[Plan, list[Any]]:
    """Full attention, then three sparse layers, the last of which reuses; one dense MLP, three MoE layers."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=rng) * std

    def norm(size: int) -> Tensor:
        return normal(size, std=0.1).bfloat16()

    def ptpc(*shape: int, std: float | None = None) -> ptpc_fp8.PtpcFp8:
        return ptpc_fp8.quantise_weight(normal(*shape, std=std or shape[-1] ** -0.5))

    def fp4(*shape: int) -> mxfp4.Mxfp4:
        return mxfp4.quantise(normal(*shape, std=1.5 * shape[-1] ** -0.5))

    rope = rope_table(POSITIONS, ROTARY, 1e4)
    slots = [Slot(-1, "embed", embed.Spec(H, VOCAB, PADDED))]
    weights: list[Any] = [embed.Weights(normal(PADDED, H).bfloat16())]
    qkv = (HEADS + 2 * KV_HEADS) * D
    for i in range(4):
        if i == 0:
            slots.append(
                Slot(i, "dense_attention", dense_attention.Spec(H, HEADS, KV_HEADS, D, ROTARY, EPS, BLOCK))
            )
            weights.append(
                dense_attention.Weights(norm(H), ptpc(qkv, H), norm(D), norm(D), ptpc(H, HEADS * D), rope)
            )
            slots.append(Slot(i, "dense_mlp", dense_mlp.Spec(H, 96, EPS, **SWIGLU)))
            weights.append(dense_mlp.Weights(norm(H), ptpc(192, H, std=0.3), ptpc(H, 96)))
            continue
        spec = sparse_attention.Spec(H, HEADS, KV_HEADS, D, ROTARY, EPS, BLOCK, D, 3, 0, 1, selects=i < 3)
        slots.append(Slot(i, "sparse_attention", spec))
        norms = (norm(D), norm(D), norm(D), norm(D))
        weights.append(
            sparse_attention.Weights(
                norm(H), ptpc(qkv + (KV_HEADS + 1) * D, H), *norms, ptpc(H, HEADS * D), rope
            )
        )
        of = moe.Spec(H, F, EXPERTS, 2, 2.0, EPS, **SWIGLU, routed_format="mxfp4", activations="mxfp8",
                      shared="fused", shared_intermediate=F)  # fmt: skip
        slots.append(Slot(i, "moe", of))
        weights.append(
            moe.Weights(
                norm(H),
                normal(EXPERTS, H, std=0.2),
                normal(EXPERTS, std=0.1),
                fp4(EXPERTS + 1, 2 * F, H),
                fp4(EXPERTS + 1, H, F),
            )
        )
    slots.append(Slot(4, "head", head.Spec(H, VOCAB, PADDED, EPS)))
    weights.append(head.Weights(norm(H), normal(PADDED, H, std=0.3).bfloat16()))
    return Plan(tuple(slots)), weights


@dataclass
class Guess:
    """Guesses drafts from the last tap it has read: right one time in four, and sensitive to every tap."""

    taps: tuple[int, ...] = TAPS
    block: int = 7
    vocab: int = VOCAB

    def new_context(self, capacity: int) -> list[Tensor]:
        return []

    def write_context(self, context: list[Tensor], taps: Tensor, start: int) -> None:
        context[:] = [taps[-1].float().cpu()]

    def propose(self, contexts: Sequence[list[Tensor]], anchors: Tensor, positions: Tensor) -> Proposal:
        rng = torch.Generator().manual_seed(9)
        heads = torch.randn(self.block, VOCAB, len(self.taps) * H, generator=rng)
        return Proposal(torch.stack([(heads @ context[0]).argmax(dim=-1) for context in contexts]))


PLAN, WEIGHTS = random_model()
SUBJECT = Subject("random", PLAN, WEIGHTS, DEPLOYMENT, Guess(), frozenset())


def candidate(
    order: int = 5, change: dict[int, Callable[[Any], Any]] | None = None, specs: dict[int, Any] | None = None
) -> Candidate:
    """The reference with sums in `order` parts, passed off as a fast arm.

    change: by slot, what is done to its weights. specs: by slot, fields of its spec that differ.
    """
    weights = [(change or {}).get(i, lambda w: w)(w) for i, w in enumerate(WEIGHTS)]
    slots = [
        replace(slot, spec=replace(slot.spec, **(specs or {}).get(i, {})))
        for i, slot in enumerate(PLAN.slots)
    ]
    built = assemble(Plan(tuple(slots)), weights, DEPLOYMENT, "reference", numerics=reordered(order))
    assert isinstance(built, Assembly)
    sides = ("fast",) * len(PLAN.slots)
    return Candidate(replace(built, plan=PLAN, sides=sides), TAPS)


def prompts(count: int = 9, length: int = 50) -> list[Prompt]:
    rng = torch.Generator().manual_seed(3)
    return [
        Prompt(f"prompt {i}", tuple(torch.randint(VOCAB, (length + i,), generator=rng).tolist()))
        for i in range(count)
    ]


def run(
    arm: Candidate,
    modes: Sequence[Mode] = MODES,
    steps: int = 24,
    given: Sequence[Prompt] | None = None,
    subject: Subject = SUBJECT,
) -> Evidence:
    return gather(subject, arm, prompts() if given is None else given, Schedule(steps, 6, (0, 3)), modes)
