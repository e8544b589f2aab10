"""Greedy decoding of the stored form, plain and speculative, and what the README reports of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from audit.tiny.problems import Prompt, flexible_answer, strict_answer
from audit.tiny.tokens import EOS, PAD, decode
from audit.tiny.training_model import Cache, Drafter, Target

MARGINS = (0.01, 0.05, 0.2, 0.5, 2.0)


@dataclass
class Decoded:
    """What decoding gave for a list of prompts, in their order."""

    tokens: list[list[int]] = field(default_factory=list)  # per prompt, its EOS included
    margins: list[float] = field(
        default_factory=list
    )  # top-1 minus top-2, of every token emitted by plain decoding
    accepted: Counter[int] = field(default_factory=Counter)  # verify steps by accepted drafts, cut at EOS
    steps: int = 0  # verify steps, one request each
    emitted: int = 0  # tokens they emitted

    def extend(self, other: "Decoded") -> None:
        self.tokens += other.tokens
        self.margins += other.margins
        self.accepted += other.accepted
        self.steps += other.steps
        self.emitted += other.emitted

    @property
    def accepted_length(self) -> float:
        return self.emitted / max(self.steps, 1)

    def right(self, prompts: Sequence[Prompt]) -> tuple[int, int]:
        """How many prompts ended in their number: by the last number of the text, by its line `#### n`."""
        texts = [decode(tokens) for tokens in self.tokens]
        flexible = sum(flexible_answer(t) == p.answer for t, p in zip(texts, prompts, strict=True))
        strict = sum(strict_answer(t) == p.answer for t, p in zip(texts, prompts, strict=True))
        return flexible, strict

    def margin_shares(self) -> dict[str, float]:
        """Share of rows with a margin below each of `MARGINS`, and the median margin."""
        margins = torch.tensor(self.margins, dtype=torch.float64)
        shares = {f"below {limit}": (margins < limit).double().mean().item() for limit in MARGINS}
        return shares | {"median": margins.median().item()}


def _prefill(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    longest: int,
    device: torch.device,
    recent: bool,
) -> tuple[Tensor, Tensor, list[Cache], list[tuple[Tensor, Tensor]]]:
    """Last-row logits [B, V], lengths [B], the target's caches, the drafter's context with room for
    decoding.
    """
    shape = target.shape
    lengths = torch.tensor([len(p.ids) for p in prompts])
    width = int(lengths.max())
    capacity = (width + longest + 2 * shape.draft_len + 16) // 16 * 16
    ids = torch.full((len(prompts), width), PAD)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt.ids)] = torch.tensor(prompt.ids)
    ids, lengths = ids.to(device), lengths.to(device)
    caches = Cache.empty(shape, len(prompts), capacity, device)
    size = (len(prompts), capacity, shape.kv_heads, shape.head_dim)
    layers = 0 if drafter is None else len(drafter.layers)
    empty = torch.zeros(size, device=device, dtype=torch.bfloat16)
    context = [(empty.clone(), empty.clone()) for _ in range(layers)]
    rows = []
    for start in range(0, len(prompts), 32):
        part = slice(start, start + 32)
        count = len(ids[part])
        positions = torch.arange(width, device=device).expand(count, -1)
        views = [Cache(c.k[part], c.v[part], c.index_k[part]) for c in caches]
        total, taps = target.decode(ids[part], positions, views, recent)
        rows.append(total[torch.arange(count, device=device), lengths[part] - 1])
        if drafter is not None:
            for (k, v), (new_k, new_v) in zip(context, drafter.context(taps, positions), strict=True):
                k[part, :width], v[part, :width] = new_k, new_v
    return target.logits(torch.cat(rows)), lengths, caches, context


@torch.no_grad()
def plain(
    target: Target, prompts: Sequence[Prompt], device: torch.device, longest: int = 256, recent: bool = False
) -> Decoded:
    """Greedy decoding, one row a step."""
    logits, positions, caches, _ = _prefill(target, None, prompts, longest, device, recent)
    done = Decoded(tokens=[[] for _ in prompts])
    live = set(range(len(prompts)))
    while live:
        top = logits.topk(2, -1)
        token = top.indices[:, 0]
        margins = (top.values[:, 0] - top.values[:, 1]).tolist()
        for row, new in enumerate(token.tolist()):
            if row in live:
                done.tokens[row].append(new)
                done.margins.append(margins[row])
                if new == EOS or len(done.tokens[row]) >= longest:
                    live.remove(row)
        total, _ = target.decode(token[:, None], positions[:, None], caches, recent)
        logits = target.logits(total[:, 0])
        positions = positions + 1
    return done


@torch.no_grad()
def speculative(
    target: Target, drafter: Drafter, prompts: Sequence[Prompt], device: torch.device, longest: int = 256
) -> Decoded:
    """Greedy decoding with a fixed verify of all drafts:

    accept while they equal the target's top-1, then its own token.
    """
    gamma = target.shape.draft_len
    logits, at, caches, context = _prefill(target, drafter, prompts, longest, device, recent=False)
    anchor = logits.argmax(-1)
    done = Decoded(tokens=[[token] for token in anchor.tolist()])
    live = {row for row in range(len(prompts)) if done.tokens[row] != [EOS]}
    batch = torch.arange(len(prompts), device=device)[:, None]
    last = caches[0].k.shape[2] - gamma - 1
    while live:
        drafts = drafter.propose(target, anchor, at, context)
        ids = torch.cat([anchor[:, None], drafts], 1)
        positions = at[:, None] + torch.arange(gamma + 1, device=device)
        total, taps = target.decode(ids, positions, caches)
        best = target.logits(total).argmax(-1)  # [B, gamma + 1]
        accepted = (drafts == best[:, :gamma]).int().cumprod(1).sum(1)
        for (k, v), (new_k, new_v) in zip(context, drafter.context(taps, positions), strict=True):
            k[batch, positions], v[batch, positions] = new_k, new_v
        for row, (count, own, proposed) in enumerate(
            zip(accepted.tolist(), best.tolist(), drafts.tolist(), strict=True)
        ):
            if row not in live:
                continue
            new = [*proposed[:count], own[count]]
            if EOS in new:
                new = new[: new.index(EOS) + 1]
                live.remove(row)
            done.tokens[row] += new
            done.accepted[min(count, len(new))] += 1
            done.steps += 1
            done.emitted += len(new)
            if row in live and len(done.tokens[row]) >= longest:
                live.remove(row)
        anchor = best.gather(1, accepted[:, None])[:, 0]
        at = (at + accepted + 1).clamp(max=last)
    return done


def in_batches(
    target: Target,
    prompts: Sequence[Prompt],
    device: torch.device,
    drafter: Drafter | None = None,
    recent: bool = False,
    size: int = 256,
) -> Decoded:
    """`plain`, or `speculative` if there is a drafter, in batches of prompts of like length."""
    order = sorted(range(len(prompts)), key=lambda row: len(prompts[row].ids))
    done, places = Decoded(), []
    for start in range(0, len(prompts), size):
        rows = order[start : start + size]
        part = [prompts[row] for row in rows]
        if drafter is None:
            done.extend(plain(target, part, device, recent=recent))
        else:
            done.extend(speculative(target, drafter, part, device))
        places += rows
    by_place = dict(zip(places, done.tokens, strict=True))
    done.tokens = [by_place[row] for row in range(len(prompts))]
    return done
