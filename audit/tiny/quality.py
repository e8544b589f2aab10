"""Measure the embedded checkpoints as they are stored, on the native reference.

    python -m audit.tiny.quality m3.1 --problems 512 --device cuda --json quality.json

Accuracy by the text's last number (flexible) and by its line `#### n` (strict), accepted length and accepted
counts under fixed verify, margins, accuracy with the most recent blocks in place of the indexer's, whether
speculative output equals plain greedy output token for token. Shares carry exact 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import triton

from audit.bounds import interval
from audit.tiny import problems
from audit.tiny.measure import MARGINS
from audit.tiny.problems import Prompt
from audit.tiny.tokens import EOS, decode
from mono.assembly import Assembly, assemble
from mono.deployment import Deployment
from mono.dspark.acceptance import Synthetic
from mono.dspark.drafter import Drafter, load_drafter
from mono.dspark.generate import Generated, StepRecord, generate
from mono.layers import embed, head, sparse_attention
from mono.models import load_model
from mono.models.registry import Model
from mono.plan import Plan
from mono.refusal import Refused

LONGEST = 256  # tokens of an answer
CONTEXT = 2048


@dataclass
class Run:
    """What decoding a list of prompts gave."""

    generated: list[Generated] = field(default_factory=list)
    accepted: Counter[int] = field(default_factory=Counter)
    emitted: int = 0
    margins: list[float] = field(default_factory=list)  # of the rows whose token was emitted
    seconds: float = 0.0

    def observe(self, record: StepRecord) -> None:
        assert not isinstance(record.acceptance, Synthetic)
        top = record.output.logits.topk(2, dim=1).values
        margin = (top[:, 0] - top[:, 1]).view(len(record.requests), -1).tolist()
        for b, kept in enumerate(record.delivered):
            self.margins += margin[b][: len(kept)]
            self.accepted[int(record.acceptance.accepted[b])] += 1
            self.emitted += len(kept)


def run(assembly: Assembly, drafter: Drafter | None, prompts: Sequence[Prompt], batch: int) -> Run:
    """Greedy decoding of every prompt to its end."""
    done = Run()
    began = time.perf_counter()
    done.generated = generate(
        assembly,
        [p.ids for p in prompts],
        LONGEST,
        CONTEXT,
        drafter,
        max_requests=batch,
        stop=(EOS,),
        on_step=done.observe,
    )
    done.seconds = time.perf_counter() - began
    return done


def share(count: int, of: int) -> dict[str, Any]:
    """A share with its exact 95 % interval."""
    bounds = interval(count, of)
    return {"count": count, "of": of, "share": count / of, "low": bounds.low, "high": bounds.high}


def accuracy(done: Run, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Flexible and strict exact match."""
    texts = [decode(g.tokens) for g in done.generated]
    flexible = sum(problems.flexible_answer(t) == p.answer for t, p in zip(texts, prompts, strict=True))
    strict = sum(problems.strict_answer(t) == p.answer for t, p in zip(texts, prompts, strict=True))
    return {"flexible": share(flexible, len(prompts)), "strict": share(strict, len(prompts))}


def speculation(done: Run) -> dict[str, Any]:
    """Accepted length, accepted counts, margins of the emitted rows."""
    steps = done.accepted.total()
    margins = torch.tensor(done.margins, dtype=torch.float64)
    return {
        "verify_steps": steps,
        "accepted_length": done.emitted / steps,
        "accepted_counts": {str(a): share(done.accepted[a], steps) for a in range(8)},
        "margin_below": {str(m): (margins < m).double().mean().item() for m in MARGINS},
        "margin_median": margins.median().item(),
        "rows": len(margins),
    }


def recency(plan: Plan) -> Plan:
    """The same stack, with a row's most recent blocks in place of the indexer's choice."""
    slots = []
    for slot in plan.slots:
        if isinstance(slot.spec, sparse_attention.Spec):
            slot = replace(slot, spec=replace(slot.spec, local_blocks=slot.spec.topk_blocks))
        slots.append(slot)
    return Plan(tuple(slots))


def build(model: Model, deployment: Deployment, plan: Plan, device: str) -> tuple[Assembly, Drafter]:
    """The native reference of `plan`, and the drafter."""
    assembly = assemble(plan, model.weights, deployment, "reference")
    if isinstance(assembly, Refused):
        raise ValueError(f"quality: {assembly}")
    table, last = model.weights[0], model.weights[-1]
    assert isinstance(table, embed.Weights)
    assert isinstance(last, head.Weights)
    stored = model.checkpoint.drafter()
    if stored is None:
        raise ValueError("quality: the checkpoint has no drafter")
    spec = plan.slots[0].spec
    assert isinstance(spec, embed.Spec)
    return assembly, load_drafter(stored, table.table, last.head, device, CONTEXT, spec.vocab)


def measure(
    path: Path, count: int, batch: int, device: str, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Everything, as one JSON object; `keep` gets what there is after each part."""
    deployment = Deployment(max_context=CONTEXT)
    model = load_model(path, deployment, device)
    assembly, drafter = build(model, deployment, model.plan, device)
    report: dict[str, Any] = {
        "checkpoint": path.name,
        "digest": model.checkpoint.digest,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    ordinary = problems.ordinary_prompts(count)
    sets = {
        "ordinary": ordinary,
        "long": problems.long_prompts(max(count // 8, 1)),
        "open": problems.open_prompts(max(count // 8, 1)),
    }
    for name, prompts in sets.items():
        done = run(assembly, drafter, prompts, batch)
        report[name] = speculation(done) | {"seconds": done.seconds}
        if name != "open":  # an open prompt is cut inside its question, so it has no known answer
            report[name] |= accuracy(done, prompts)
        print(f"{name}: {json.dumps(report[name])}", flush=True)
        keep(report)
    few = ordinary[: max(count // 2, 1)]
    recent, _ = build(model, deployment, recency(model.plan), device)
    report["recency"] = accuracy(run(recent, drafter, few, batch), few)
    print(f"recency: {json.dumps(report['recency'])}", flush=True)
    keep(report)
    # one request at a time, so that plain rows and verify rows take the same tile of 16
    few = ordinary[: min(count, 100)]
    plain, spec = (run(assembly, d, few, 1) for d in (None, drafter))
    same = sum(a.tokens == b.tokens for a, b in zip(plain.generated, spec.generated, strict=True))
    report["speculative_equals_plain"] = share(same, len(few))
    print(f"speculative equals plain: {same} of {len(few)}", flush=True)
    keep(report)
    return report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="`m3`, `m3.1`, or a folder")
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="requests decoded together")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path, help="where the report goes")
    args = parser.parse_args()
    embedded = Path(__file__).parent / args.checkpoint
    path = embedded if embedded.is_dir() else Path(args.checkpoint)

    def keep(report: dict[str, Any]) -> None:
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n")

    measure(path, args.problems, args.batch, args.device, keep)


if __name__ == "__main__":
    main()
