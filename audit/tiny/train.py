"""Train the embedded checkpoints: two targets, then a drafter for each.

    python -m audit.tiny.train --out DIR

writes `DIR/m3` and `DIR/m3.1` in the layout of `audit.tiny.export`, the weights they were quantised from, and
`DIR/report.json`. Steps, batches and seeds are fixed; only the device's own sums make two runs differ. Meant
for one large GPU; `--rehearse` runs every phase at a size for a CPU, to test the program, not the models.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from audit.tiny.measure import Decoded, in_batches
from audit.tiny.problems import document, open_prompts, ordinary_prompts
from audit.tiny.tokens import TOKENS
from audit.tiny.training_model import (
    Drafter,
    Experts,
    Shape,
    Target,
    rounded_to_storage,
    stored,
    stored_drafter,
)

SHAPES = {"m3.1": Shape(full_attention_layers=0), "m3": Shape(full_attention_layers=3)}
QUESTION_WEIGHT = 0.5  # of a question byte's loss, against 1 for an answer byte
SMOOTHING = 0.05  # of the labels, over all tokens: keeps the model from being surer than anything can test
INDEX_ROWS = 64  # query rows a step that teach the indexer


@dataclass(frozen=True)
class Phase:
    """A number of steps of `batch` documents of `length` tokens."""

    name: str
    steps: int
    batch: int
    length: int
    rate: float  # peak learning rate
    floor: float  # what it falls to, as a share of the peak; linear after warm-up
    warm_up: int
    balance: float = 0.0  # step of the router's correction bias


@dataclass(frozen=True)
class Plan:
    dense: Phase
    sparse: dict[str, Phase]
    drafter: Phase
    anchors: int
    snapshots: tuple[int, ...]
    prompts: int  # for a full measurement
    quick: int  # for a drafter's snapshot


FULL = Plan(
    dense=Phase("dense", 1300, 64, 512, 2e-3, 1.0, 100, 0.003),
    sparse={
        "m3.1": Phase("m3.1 sparse", 750, 20, 1536, 1.5e-3, 0.05, 30, 0.001),
        "m3": Phase("m3 sparse", 650, 20, 1536, 1.5e-3, 0.05, 30, 0.001),
    },
    drafter=Phase("drafter", 400, 12, 1536, 1.5e-3, 0.2, 50),
    anchors=128,
    snapshots=(40, 60, 90, 130, 190, 270, 400),
    prompts=512,
    quick=160,
)
REHEARSAL = Plan(
    dense=Phase("dense", 3, 2, 256, 2e-3, 1.0, 2, 0.003),
    sparse={
        "m3.1": Phase("m3.1 sparse", 2, 1, 512, 1.5e-3, 0.05, 1, 0.001),
        "m3": Phase("m3 sparse", 2, 1, 512, 1.5e-3, 0.05, 1, 0.001),
    },
    drafter=Phase("drafter", 3, 1, 512, 2e-3, 0.2, 1),
    anchors=8,
    snapshots=(1, 3),
    prompts=1,
    quick=1,
)


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s]", *words, flush=True)


STARTED = time.perf_counter()


# Data


def _documents(task: tuple[str, int, int]) -> tuple[np.ndarray, np.ndarray]:
    seed, batch, length = task
    rng = Random(seed)
    made = [document(rng, length) for _ in range(batch)]
    return np.array([ids for ids, _ in made], np.int16), np.array([mask for _, mask in made])


def batches(
    pool: Pool | None, phase: Phase, seed: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids [B, T] and the mask of answer bytes [B, T], a function of seed, phase and step alone."""
    tasks = [(f"{seed} {phase.name} {step}", phase.batch, phase.length) for step in range(phase.steps)]
    made = map(_documents, tasks) if pool is None else pool.imap(_documents, tasks)
    for ids, mask in made:
        yield torch.from_numpy(ids).to(device).long(), torch.from_numpy(mask).to(device)


# Targets


def language_loss(logits: Tensor, ids: Tensor, in_answer: Tensor) -> Tensor:
    """Smoothed cross-entropy of the next byte, a question's bytes at a lower weight."""
    logp = logits[:, :-1, :TOKENS].log_softmax(-1)
    right = logp.gather(-1, ids[:, 1:, None])[..., 0]
    loss = -(1 - SMOOTHING) * right - SMOOTHING * logp.mean(-1)
    weight = torch.where(in_answer[:, 1:], 1.0, QUESTION_WEIGHT)
    return (loss * weight).sum() / weight.sum()


def optimiser(model: nn.Module, decay: float, exempt: tuple[str, ...]) -> torch.optim.AdamW:
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and n not in exempt]
    others = [p for n, p in model.named_parameters() if p.dim() <= 1 or n in exempt]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def set_rate(opt: torch.optim.Optimizer, phase: Phase, step: int) -> None:
    warm = min(1.0, (step + 1) / phase.warm_up)
    fallen = 1.0 - (1.0 - phase.floor) * max(0, step - phase.warm_up) / max(1, phase.steps - phase.warm_up)
    for group in opt.param_groups:
        group["lr"] = phase.rate * warm * fallen


def train_target(
    target: Target,
    phase: Phase,
    sparse: bool,
    pool: Pool | None,
    seed: int,
    device: torch.device,
    limit: float,
) -> None:
    """One phase on `target`, in place."""
    target.train()
    opt = optimiser(target, 0.1, ("embed", "head"))
    rows_from = torch.Generator().manual_seed(seed)
    begun = time.perf_counter()
    for step, (ids, in_answer) in enumerate(batches(pool, phase, seed, device)):
        set_rate(opt, phase, step)
        rows = torch.randint(64, phase.length, (INDEX_ROWS,), generator=rows_from).to(device)
        try:
            out = target(ids, sparse, rows)
            loss = language_loss(out.logits, ids, in_answer)
            (loss + out.indexer_loss).backward()
        except Exception as error:
            if step or all(layer._compiled_call_impl is None for layer in target.layers):
                raise
            say(f"{phase.name}: not compiled, {type(error).__name__}: {str(error)[:300]}")
            for layer in target.layers:
                layer._compiled_call_impl = None
            opt.zero_grad(set_to_none=True)
            out = target(ids, sparse, rows)
            loss = language_loss(out.logits, ids, in_answer)
            (loss + out.indexer_loss).backward()
        nn.utils.clip_grad_norm_(target.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        routers = [layer.mlp for layer in target.layers if isinstance(layer.mlp, Experts)]
        with torch.no_grad():
            for router, load in zip(routers, out.loads, strict=True):
                router.bias += phase.balance * (load.mean() - load).sign()
        if step % 100 == 0 or step == phase.steps - 1:
            with torch.no_grad():
                hit = (out.logits[:, :-1].argmax(-1) == ids[:, 1:])[in_answer[:, 1:]].float().mean()
                loads = torch.stack(out.loads) / out.loads[0].mean()
            say(
                f"{phase.name} step {step}: loss {loss.item():.4f}, indexer {out.indexer_loss.item():.4f}, "
                f"answer bytes {hit.item():.4f}, loads {loads.min().item():.2f}..{loads.max().item():.2f}"
            )
        if time.perf_counter() - begun > limit:
            say(f"{phase.name}: stopped by its limit of {limit:.0f} s after {step + 1} steps")
            break


# Drafters


def drafter_loss(
    drafter: Drafter, target: Target, ids: Tensor, in_answer: Tensor, anchors: int
) -> tuple[Tensor, Tensor]:
    """Loss on `anchors` random answer bytes of each document, and agreement [7] with the target's top-1."""
    gamma = drafter.shape.draft_len
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    with torch.no_grad():
        total, taps = target.decode(ids, positions, None)
        allowed = in_answer.clone()
        allowed[:, -gamma - 1 :] = False
        allowed[:, 0] = False
        at = allowed.float().multinomial(anchors, replacement=True)  # [B, A]
        rows = at[..., None] + torch.arange(gamma, device=ids.device)  # [B, A, 7]
        batch = torch.arange(ids.shape[0], device=ids.device)[:, None, None]
        want = target.logits(total[batch, rows])
        previous = ids[batch, rows]
    context = drafter.context(taps, positions)
    hidden, base = drafter.block(target, ids[batch[..., 0], at], at, context)
    logits, sure = drafter.step(hidden, base, previous)
    label = want.argmax(-1)
    logp = logits[..., :TOKENS].log_softmax(-1)
    cross = -logp.gather(-1, label[..., None])[..., 0]
    distance = 0.5 * (logp.exp() - want[..., :TOKENS].softmax(-1)).abs().sum(-1)
    confidence = F.binary_cross_entropy_with_logits(sure, 1 - distance.detach(), reduction="none")
    weight = torch.exp(-torch.arange(gamma, device=ids.device) / gamma)
    loss = ((0.5 * cross + 0.5 * distance + 0.3 * confidence) * weight).mean()
    return loss, (logits.argmax(-1) == label).float().mean((0, 1)).detach()


def describe(done: Decoded) -> dict[str, object]:
    return {
        "accepted length": round(done.accepted_length, 3),
        "verify steps": done.steps,
        "accepted": [done.accepted[a] for a in range(8)],
        "smallest share": round(min(done.accepted[a] for a in range(8)) / max(done.steps, 1), 4),
    }


def train_drafter(
    name: str, target: Target, plan: Plan, pool: Pool | None, seed: int, device: torch.device, limit: float
) -> list[tuple[dict[str, object], Drafter]]:
    """Train against the stored target; returns every snapshot, measured, as it would be stored."""
    torch.manual_seed(seed)
    drafter = Drafter(target.shape).to(device).train()
    phase = replace(plan.drafter, name=f"{name} drafter")
    opt = optimiser(drafter, 0.05, ("markov_w1",))
    prompts = ordinary_prompts(plan.quick, seed=1)
    kept, spent = [], 0.0
    begun = time.perf_counter()
    for step, (ids, in_answer) in enumerate(batches(pool, phase, seed, device)):
        set_rate(opt, phase, step)
        loss, agree = drafter_loss(drafter, target, ids, in_answer, plan.anchors)
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        late = time.perf_counter() - begun - spent > limit
        if step + 1 in plan.snapshots or late:
            say(
                f"{phase.name} step {step + 1}: loss {loss.item():.4f}, "
                f"agreement {[round(a, 3) for a in agree.tolist()]}"
            )
            before = time.perf_counter()
            snapshot = rounded_to_storage(drafter)
            done = in_batches(target, prompts, device, drafter=stored_drafter(drafter))
            measured = {"steps": step + 1} | describe(done)
            say(phase.name, measured)
            kept.append((measured, snapshot))
            spent += time.perf_counter() - before
        if late:
            say(f"{phase.name}: stopped by its limit of {limit:.0f} s")
            break
    return kept


def balanced(measured: dict[str, object]) -> float:
    """How well a snapshot exercises every accepted count:

    its rarest one's share, less what its mean is out of 3.3..5.7.
    """
    length, share = float(str(measured["accepted length"])), float(str(measured["smallest share"]))
    return share - max(0.0, 3.3 - length) - max(0.0, length - 5.7)


# Files


def save_target(target: nn.Module, path: Path) -> None:
    """bf16, the router and its bias fp32, in two files of like size."""
    state = {
        name: value.detach().cpu().contiguous()
        if name.endswith((".gate", ".bias"))
        else value.detach().bfloat16().cpu()
        for name, value in target.state_dict().items()
    }
    names = sorted(state, key=lambda n: state[n].nbytes)
    for half in (0, 1):
        save_file(
            {n: state[n] for n in names[half::2]}, path.with_name(f"{path.name}-weights-{half}.safetensors")
        )


def load_target(shape: Shape, path: Path) -> Target:
    target = Target(shape)
    state: dict[str, Tensor] = {}
    for half in (0, 1):
        state |= load_file(path.with_name(f"{path.name}-weights-{half}.safetensors"))
    target.load_state_dict({name: value.float() for name, value in state.items()})
    return target


def save_drafters(path: Path, drafters: list[tuple[dict[str, object], Drafter]]) -> None:
    save_file(
        {
            f"{measured['steps']}.{name}": value.detach().bfloat16().cpu().contiguous()
            for measured, drafter in drafters
            for name, value in drafter.state_dict().items()
        },
        path,
    )


def load_drafter(shape: Shape, path: Path, steps: int) -> Drafter:
    drafter = Drafter(shape)
    prefix = f"{steps}."
    state = {n.removeprefix(prefix): v.float() for n, v in load_file(path).items() if n.startswith(prefix)}
    drafter.load_state_dict(state)
    return drafter


# Program


@contextmanager
def workers(count: int) -> Iterator[Pool | None]:
    if count < 1:
        yield None
        return
    with multiprocessing.get_context("fork").Pool(count) as pool:
        yield pool


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="audit.tiny.train", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--weights", type=Path, help="take the targets' weights from here, train the drafters alone"
    )
    parser.add_argument("--rehearse", action="store_true", help="every phase, tiny, on the CPU")
    parser.add_argument("--no-export", action="store_true", help="keep the weights, write no checkpoint")
    parser.add_argument("--workers", type=int, default=12, help="processes that write problems")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    for name in SHAPES:
        if not asked.no_export and (asked.out / name).exists():
            parser.error(f"{asked.out / name}: expected a new folder, it exists")
    plan = REHEARSAL if asked.rehearse else FULL
    with workers(asked.workers) as pool:  # before the GPU is touched, since they are forked
        run(asked, plan, pool)


def run(asked: argparse.Namespace, plan: Plan, pool: Pool | None) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and not asked.rehearse else "cpu")
    torch.set_float32_matmul_precision(
        "high"
    )  # stored form: its fp32 products are of values that TF32 holds exactly
    torch._dynamo.config.cache_size_limit = 64
    out, seed = asked.out, asked.seed
    prompts, opened = ordinary_prompts(plan.prompts), open_prompts(max(1, plan.prompts // 4))
    report: dict[str, dict[str, object]] = {name: {} for name in SHAPES}

    def write_report() -> None:
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")

    torch.manual_seed(seed)
    dense = None
    if asked.weights is None:
        dense = Target(SHAPES["m3.1"]).to(device)
        prepare(dense, device)
        say(f"target of {sum(p.numel() for p in dense.parameters()):,} parameters on {device}")
        train_target(dense, plan.dense, False, pool, seed, device, limit=120)
    for name, shape in SHAPES.items():
        if dense is None:
            target = load_target(shape, asked.weights / name).to(device)
        else:
            target = Target(shape).to(device)
            target.load_state_dict(dense.state_dict())
            prepare(target, device)
            train_target(target, plan.sparse[name], True, pool, seed + 1, device, limit=90)
            save_target(target, out / name)
        served = stored(target)
        if dense is not None:
            done = in_batches(served, prompts, device)
            say(
                name,
                "right, flexible and strict:",
                done.right(prompts),
                "of",
                len(prompts),
                done.margin_shares(),
            )
            control = in_batches(served, prompts[: plan.quick], device, recent=True)
            say(name, "most recent blocks:", control.right(prompts[: plan.quick]), "of", plan.quick)
            freely = in_batches(served, opened, device)
            say(name, "open prompts:", freely.margin_shares())
            report[name]["prompts"] = len(prompts)
            report[name]["right"] = done.right(prompts)
            report[name]["margins"] = done.margin_shares()
            report[name]["margins open"] = freely.margin_shares()
            report[name]["recent blocks right"] = [*control.right(prompts[: plan.quick]), plan.quick]
            write_report()
        drafters = train_drafter(name, served, plan, pool, seed + 2, device, limit=40)
        report[name]["drafters"] = [measured for measured, _ in drafters]
        drafters.sort(key=lambda pair: balanced(pair[0]), reverse=True)
        save_drafters(out / f"{name}-drafters.safetensors", drafters[:3])
        measured, best = drafters[0]
        done = in_batches(served, prompts, device, drafter=stored_drafter(best))
        report[name]["drafter"] = {"steps": measured["steps"], "right": done.right(prompts)} | describe(done)
        say(name, "chosen drafter:", report[name]["drafter"])
        freely = in_batches(served, opened, device, drafter=stored_drafter(best))
        report[name]["drafter"] |= {"open": describe(freely)}  # type: ignore[operator]
        say(name, "chosen drafter, open prompts:", describe(freely))
        write_report()
        if not asked.no_export:
            from audit.tiny.export import export

            export(rounded_to_storage(target), best, out / name)
        if device.type == "cuda":
            say(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def prepare(target: Target, device: torch.device) -> None:
    """Compile the layers, where that pays."""
    if device.type == "cuda":
        for layer in target.layers:
            layer.compile(dynamic=False)


if __name__ == "__main__":
    main(sys.argv[1:])
