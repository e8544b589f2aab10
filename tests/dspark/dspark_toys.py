"""Small models for the speculative tests: a random target, drafters, and a toy that adds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mono.assembly import Assembly, assemble
from mono.caches import LayerCache, PagePool
from mono.deployment import Deployment
from mono.dspark import Drafter, DrafterSpec, DrafterWeights, Generator, LayerWeights, Proposal, empty_caches
from mono.formats import mxfp4, mxfp8, ptpc_fp8
from mono.interface import Carry, Layer
from mono.layers import dense_attention, dense_mlp, embed, head, moe, sparse_attention
from mono.parallel import SOLO
from mono.plan import Plan, Slot
from mono.reference.numerics import FLOAT64, Numerics
from mono.reference.ops.rms_norm import absorb
from mono.reference.ops.rope import rope_table
from mono.reference.ops.top1 import top1
from mono.step import Step

H, VOCAB, PADDED, BLOCK, POSITIONS = 64, 60, 64, 8, 192
HEADS, KV_HEADS, D, ROTARY, EPS, THETA = 4, 2, 16, 8, 1e-6, 1e4
SWIGLU = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
TAPS = (-1, 1, 3)  # the embedding and the last layer among them


class Random:
    """Weights from one seeded stream, so that a model is a function of its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=self.rng) * std

    def norm(self, size: int) -> Tensor:
        return self.normal(size, std=0.1).bfloat16()

    def ptpc(self, *shape: int) -> ptpc_fp8.PtpcFp8:
        return ptpc_fp8.quantise_weight(self.normal(*shape, std=shape[-1] ** -0.5))

    def mxfp8(self, *shape: int) -> mxfp8.Mxfp8:
        return mxfp8.quantise(self.normal(*shape, std=shape[-1] ** -0.5))

    def mxfp4(self, *shape: int) -> mxfp4.Mxfp4:
        return mxfp4.quantise(self.normal(*shape, std=shape[-1] ** -0.5))


def tiny_target(seed: int = 0, numerics: Numerics = FLOAT64) -> Assembly:
    """Four random decoder layers: full, sparse, sparse, sparse that reuses; two MLPs, two MoEs.

    Sums are float64 unless asked otherwise: a row's bits then do not depend on how many rows its step has, so
    token-for-token equality of one-row and eight-row steps speaks of the loop, and holds on any machine.
    """
    r = Random(seed)
    rope = rope_table(POSITIONS, ROTARY, THETA)
    slots: list[Slot] = [Slot(-1, "embed", embed.Spec(H, VOCAB, PADDED))]
    weights: list[object] = [embed.Weights(r.normal(PADDED, H).bfloat16())]
    qkv = (HEADS + 2 * KV_HEADS) * D
    for i in range(4):
        if i == 0:
            spec = dense_attention.Spec(H, HEADS, KV_HEADS, D, ROTARY, EPS, BLOCK)
            slots.append(Slot(i, "dense_attention", spec))
            weights.append(
                dense_attention.Weights(
                    r.norm(H), r.ptpc(qkv, H), r.norm(D), r.norm(D), r.ptpc(H, HEADS * D), rope
                )
            )
        else:
            sparse = sparse_attention.Spec(
                H, HEADS, KV_HEADS, D, ROTARY, EPS, BLOCK, D, 3, 0, 1, selects=i < 3
            )
            slots.append(Slot(i, "sparse_attention", sparse))
            weights.append(
                sparse_attention.Weights(
                    r.norm(H),
                    r.ptpc(qkv + (KV_HEADS + 1) * D, H),
                    *(r.norm(D) for _ in range(4)),
                    r.ptpc(H, HEADS * D),
                    rope,
                )
            )
        if i < 2:
            slots.append(Slot(i, "dense_mlp", dense_mlp.Spec(H, 64, EPS, **SWIGLU)))
            weights.append(dense_mlp.Weights(r.norm(H), r.ptpc(128, H), r.ptpc(H, 64)))
        else:
            slots.append(
                Slot(i, "moe", moe.Spec(H, 32, 4, 2, 2.0, EPS, **SWIGLU, routed_format="mxfp4",
                                        activations="mxfp8", shared="fused", shared_intermediate=32))
            )  # fmt: skip
            weights.append(
                moe.Weights(
                    r.norm(H), r.normal(4, H), r.normal(4, std=0.1), r.mxfp4(5, 64, H), r.mxfp4(5, H, 32)
                )
            )
    slots.append(Slot(4, "head", head.Spec(H, VOCAB, PADDED, EPS)))
    weights.append(head.Weights(r.norm(H), r.normal(PADDED, H).bfloat16()))
    served = Deployment(max_context=POSITIONS)
    built = assemble(Plan(tuple(slots)), weights, served, "reference", numerics=numerics)  # type: ignore[arg-type]
    assert isinstance(built, Assembly)
    return built


def drafter_spec(block: int = 7, window: int | None = 24, taps: tuple[int, ...] = TAPS) -> DrafterSpec:
    return DrafterSpec(
        hidden=H, vocab=VOCAB, layers=2, heads=HEADS, kv_heads=KV_HEADS, head_dim=D, rotary_dim=ROTARY,
        theta=THETA, eps=EPS, ffn=96, taps=taps, block=block, markov_rank=8, window=window, noise_token=59,
        **SWIGLU,
    )  # fmt: skip


def drafter_weights(spec: DrafterSpec, seed: int = 1) -> DrafterWeights:
    r = Random(seed)
    layers = tuple(
        LayerWeights(
            input_norm=r.norm(H),
            q=r.mxfp8(HEADS * D, H),
            k=r.mxfp8(KV_HEADS * D, H),
            v=r.mxfp8(KV_HEADS * D, H),
            q_norm=r.norm(D),
            k_norm=r.norm(D),
            o=r.mxfp8(H, HEADS * D),
            post_norm=r.norm(H),
            gate=r.mxfp8(spec.ffn, H),
            up=r.mxfp8(spec.ffn, H),
            down=r.mxfp8(H, spec.ffn),
        )
        for _ in range(spec.layers)
    )
    m = len(spec.taps)
    return DrafterWeights(
        fc=r.normal(H, m * H, std=(m * H) ** -0.5).bfloat16(),
        context_norm=r.norm(H),
        layers=layers,
        final_norm=r.norm(H),
        markov_w1=r.normal(PADDED, 8).bfloat16(),
        markov_w2=r.normal(PADDED, 8).bfloat16(),
        embed=r.normal(PADDED, H).bfloat16(),
        head=r.normal(PADDED, H).bfloat16(),
        rope=rope_table(POSITIONS, ROTARY, THETA),
    )


def tiny_drafter(
    seed: int = 1, numerics: Numerics = FLOAT64, block: int = 7, window: int | None = 24
) -> Drafter:
    spec = drafter_spec(block, window)
    return Drafter(spec, drafter_weights(spec, seed), numerics)


@dataclass
class OracleContext:
    """number: which prompt; contexts are made in the prompts' order. taps: what was written, by position."""

    number: int
    taps: list[Tensor] = field(default_factory=list)


class Oracle:
    """Drafts the target's own text, wrong where `wrong(request, position)` says so."""

    vocab = VOCAB

    def __init__(
        self,
        truth: Sequence[Sequence[int]],
        wrong: Callable[[int, int], bool] = lambda request, position: False,
        block: int = 7,
        taps: tuple[int, ...] = TAPS,
    ) -> None:
        self.truth, self.wrong, self.block, self.taps = truth, wrong, block, taps
        self.contexts: list[OracleContext] = []

    def new_context(self, capacity: int) -> OracleContext:
        self.contexts.append(OracleContext(len(self.contexts)))
        return self.contexts[-1]

    def write_context(self, context: OracleContext, taps: Tensor, start: int) -> None:
        assert start == len(context.taps), "a gap, or a position twice"
        context.taps += [row.clone() for row in taps]

    def propose(self, contexts: Sequence[OracleContext], anchors: Tensor, positions: Tensor) -> Proposal:
        rows = []
        for context, anchor, P in zip(contexts, anchors.tolist(), positions.tolist(), strict=True):
            assert len(context.taps) == P, "the context ends right before the anchor"
            text = self.truth[context.number]
            assert anchor == text[P]
            row = []
            for at in range(P + 1, P + 1 + self.block):
                token = text[at] if at < len(text) else 0
                row.append((token + 1) % VOCAB if self.wrong(context.number, at) else token)
            rows.append(row)
        return Proposal(torch.tensor(rows, dtype=torch.int64).view(len(rows), self.block))


def generator(assembly: Assembly, drafter: object = None, pages: int = 48, **options: object) -> Generator:
    """A generator with caches of its own over `pages` pages of NaN."""
    options.setdefault("max_context", POSITIONS)
    caches = empty_caches(assembly.plan, pages)
    return Generator(assembly, caches, PagePool(pages), drafter=drafter, **options)  # type: ignore[arg-type]


def prompts(*lengths: int, seed: int = 5) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (n,), generator=rng).tolist() for n in lengths]


# A target whose text is written down, and a drafter that adds


ADDING_VOCAB = 97


def scripted_target(script: dict[int, int], block_size: int = 4) -> Assembly:
    """A target that emits `script[p]` after the token at position p, whatever it read.

    Its one decoder layer keeps every token's id as its key, and its only tap is that id.
    """
    size = 4

    def embed_ids(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        return replace(carry, partial=step.tokens[:, None].expand(-1, size).bfloat16())

    def attention(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        total = absorb(carry, SOLO)
        cache.insert_kv(step.slots, *(total.bfloat16().view(-1, 1, size) for _ in range(2)))
        return replace(carry, residual=total.bfloat16(), partial=torch.zeros_like(total).bfloat16())

    def nothing(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        total = absorb(carry, SOLO)
        return replace(carry, residual=total.bfloat16(), partial=torch.zeros_like(total).bfloat16())

    def say(carry: Carry, step: Step, cache: LayerCache) -> Carry:
        total = absorb(carry, SOLO)
        said = torch.tensor([script.get(p, 0) for p in step.positions.tolist()])
        logits = torch.nn.functional.one_hot(said, ADDING_VOCAB).float()
        return replace(carry, residual=total.bfloat16(), logits=logits, top1=top1(logits, ADDING_VOCAB))

    plan = Plan(
        (
            Slot(-1, "embed", embed.Spec(size, ADDING_VOCAB, ADDING_VOCAB)),
            Slot(0, "dense_attention", dense_attention.Spec(size, 1, 1, size, size, EPS, block_size)),
            Slot(0, "dense_mlp", dense_mlp.Spec(size, size, EPS, **SWIGLU)),
            Slot(1, "head", head.Spec(size, ADDING_VOCAB, ADDING_VOCAB, EPS)),
        )
    )
    layers: tuple[Layer, ...] = (embed_ids, attention, nothing, say)
    return Assembly(plan, layers, ("reference",) * 4, torch.device("cpu"), Deployment())


class Adding:
    """The next token is the sum of the ids in its cache, modulo 97; the cache is fed by the target's tap."""

    taps = (0,)
    vocab = ADDING_VOCAB

    def __init__(self, block: int) -> None:
        self.block = block
        self.contexts: list[list[int]] = []
        self.proposed: list[list[int]] = []

    def new_context(self, capacity: int) -> list[int]:
        self.contexts.append([])
        return self.contexts[-1]

    def write_context(self, context: list[int], taps: Tensor, start: int) -> None:
        context[start:] = taps[:, 0].long().tolist()

    def propose(self, contexts: Sequence[list[int]], anchors: Tensor, positions: Tensor) -> Proposal:
        rows = []
        for context, anchor, P in zip(contexts, anchors.tolist(), positions.tolist(), strict=True):
            ids = [*context[:P], anchor]
            for _ in range(max(self.block, 1)):
                ids.append(sum(ids) % ADDING_VOCAB)
            rows.append(ids[P + 1 :])
        self.proposed += rows
        return Proposal(torch.tensor(rows, dtype=torch.int64)[:, : self.block])
