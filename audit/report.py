"""The report: a page that a person reads in a minute, and everything as JSON."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from audit.evidence import Evidence
from audit.floor import FACTOR, Judged
from audit.inputs import Unusable
from audit.logits import JudgedLogits
from audit.verdict import Outcome, Verdict

SCHEMA = "mono-audit-compare/1"
COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow"}
MOST_REASONS = 12


def show(
    console: Console, evidence: Evidence, verdict: Verdict, device: torch.device, seed: int
) -> dict[str, Any]:
    """Print the page, and return the run as JSON values."""
    subject = evidence.subject
    console.print()
    console.rule(f"{subject.name}: [bold {COLOURS[verdict.outcome]}]{verdict.outcome.name.lower()}")
    for why in verdict.reasons[:MOST_REASONS]:
        console.print(f"  {why}", highlight=False, markup=False)
    if len(verdict.reasons) > MOST_REASONS:
        console.print(f"  and {len(verdict.reasons) - MOST_REASONS} more reasons (see --json)")
    widths = ", ".join(f"{count} at width {width}" for width, count in sorted(evidence.widths.items()))
    console.print(
        f"{evidence.steps} verify steps ({widths}) of {len(evidence.prompts)} prompts, {evidence.rows} rows,"
        f" contexts to {evidence.longest}, {_device(device)}, modes {', '.join(evidence.modes)}",
        highlight=False,
    )
    if verdict.slots:
        console.print(_slots("slot by slot, against float64", verdict.slots))
    if verdict.whole:
        console.print(
            _slots("whole steps: taps and own caches, against the reference", _worst_layers(verdict.whole))
        )
    for found in verdict.logits:
        _tokens(console, found)
    if evidence.drafts.blocks:
        differ = evidence.drafts.differ
        floor = ", ".join(f"{arm} {count}" for arm, count in differ.items() if arm != "fast")
        console.print(
            f"drafts after own taps: {differ.get('fast', 0)} of {evidence.drafts.blocks} blocks differ"
            f" (floor arms: {floor})",
            highlight=False,
        )
    _power(console, verdict)
    console.print("not tested: " + "; ".join(verdict.not_tested), highlight=False)
    return run_as_json(evidence, verdict, device, seed)


def _slots(title: str, judged: list[Judged]) -> Table:
    table = Table(
        title=f"{title}; {judged[0].rows} rows",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        caption=f"worst row and mean, each over its floor: limit {FACTOR:g}; ties: near ties",
        caption_justify="left",
    )
    table.add_column("place, its worst output", no_wrap=True)
    for column in ("floor", "worst", "x floor", "mean", "ties"):
        table.add_column(column, justify="right", no_wrap=True)
    places: dict[str, list[Judged]] = {}
    for found in judged:
        places.setdefault(found.place, []).append(found)
    for place, outputs in places.items():
        worst = max(outputs, key=lambda found: (len(found.reasons), found.ratio, found.mean_ratio))
        table.add_row(
            f"{place} {worst.output}",
            f"{worst.floor:.1e}",
            f"{worst.worst:.1e}",
            f"{worst.ratio:.2f}",
            f"{worst.mean_ratio:.2f}",
            str(sum(found.explained for found in outputs)),
            style="red" if any(found.reasons for found in outputs) else "",
        )
    return table


def _worst_layers(judged: list[Judged]) -> list[Judged]:
    """Taps, and of the caches the failing places or else the worst one: the rest is in the JSON."""
    caches = [found for found in judged if found.place.endswith("own cache")]
    failing = {found.place for found in caches if found.reasons}
    if caches and not failing:
        failing = {max(caches, key=lambda found: found.ratio).place}
    return [found for found in judged if found not in caches or found.place in failing]


def _tokens(console: Console, found: JudgedLogits) -> None:
    counted, noise = found.tally, found.noise
    accepted = " ".join(str(counted.accepted[a]) for a in sorted(counted.accepted))
    console.print(
        f"[bold]{found.mode}[/bold]: {counted.steps} steps, {counted.decisive_rows} decisive rows of"
        f" {counted.rows}; accepted 0..{len(counted.accepted) - 1}: {accepted}"
        f" (mean {counted.accepted_mean:.2f})",
        highlight=False,
    )
    console.print(
        f"  L0 length differs {counted.length_differs}, L1 tokens differ {counted.tokens_differ}"
        f" (floor arms {found.control_divergent} of {found.control_steps}), L2 any top-1 differs"
        f" {counted.top1_differs}",
        highlight=False,
    )
    rows = max(counted.rows, 1)
    flips = sum(found.classes.values())
    console.print(
        f"  top-1 equal on {(rows - flips) / rows:.2%} of rows (95 % {found.agreement.low:.2%} to"
        f" {found.agreement.high:.2%}); flips {flips}"
        f" ({', '.join(f'{kind} {count}' for kind, count in found.classes.items())};"
        f" before/at/after the accepted {' / '.join(str(n) for n in counted.flips.values())});"
        f" expected {found.expected:.1f}, floor arms {found.control_flips} of {found.control_rows}",
        highlight=False,
    )
    console.print(
        f"  margin change: size {found.size:.2e} (floor {noise.size:.2e}), robust sigma {found.sigma:.1e}"
        f" (floor {noise.sigma:.1e}), mean {found.shift.mean:+.1e} +- {found.shift.error:.1e};"
        f" KL median {found.kl[0]:.1e}, 99 % {found.kl[1]:.1e}, max {found.kl[2]:.1e}"
        f" (floor max {found.kl_floor[2]:.1e})",
        highlight=False,
    )


def _power(console: Console, verdict: Verdict) -> None:
    if not verdict.logits:
        return
    bound, every = verdict.logits[0].unexplained, verdict.logits[0].divergent
    console.print(
        f"power: steps with other tokens that no near tie explains {bound.events} of {bound.trials},"
        f" at most {bound.upper_effective:.2%} at 95 %;"
        f" on prompts {bound.clusters_hit} of {bound.clusters}, at most {bound.upper_clusters:.1%};"
        f" near ties counted {every.events}, at most {every.upper_effective:.2%};"
        f" the budget of {verdict.budget:.2%} takes {verdict.needed} clean steps",
        highlight=False,
    )


def run_as_json(evidence: Evidence, verdict: Verdict, device: torch.device, seed: int) -> dict[str, Any]:
    """Everything a run saw and decided, as JSON values."""
    subject = evidence.subject
    return {
        "checkpoint": subject.name,
        "verdict": verdict.outcome.name.lower(),
        "exit_code": int(verdict.outcome),
        "reasons": verdict.reasons,
        "deployment": asdict(subject.deployment),
        "device": _device(device),
        "torch": torch.__version__,
        "seed": seed,
        "modes": list(evidence.modes),
        "steps": evidence.steps,
        "rows": evidence.rows,
        "rows_selecting": evidence.rows_selecting,
        "longest_context": evidence.longest,
        "steps_by_width": dict(evidence.widths),
        "steps_by_prompt": dict(evidence.prompts),
        "steps_by_accepted": dict(evidence.accepted),
        "slots": [values(found) for found in verdict.slots],
        "whole": [values(found) for found in verdict.whole],
        "logits": [values(found) for found in verdict.logits],
        "drafts": values(evidence.drafts),
        "reference_slots": list(evidence.reference_slots),
        "not_tested": verdict.not_tested,
        "budget": verdict.budget,
        "steps_needed": verdict.needed,
    }


def as_json(runs: list[dict[str, Any]]) -> str:
    """The runs as one document. JSON has no NaN and no infinity: they are written as strings."""
    return json.dumps({"schema": SCHEMA, "runs": values(runs)}, indent=1, allow_nan=False) + "\n"


def values(x: Any) -> Any:
    """Dataclasses, tuples and numbers as JSON values; arrays of raw noise are left out."""
    if is_dataclass(x) and not isinstance(x, type):
        return {name: values(getattr(x, name)) for name in x.__dataclass_fields__ if name != "changes"}
    if isinstance(x, dict):
        return {str(key): values(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [values(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x


class WholeFile:
    """A file that appears whole or not at all. Its folder is tried before the work starts."""

    def __init__(self, path: Path, option: str) -> None:
        """Errors: Unusable if the path is a folder, or its folder cannot be written."""
        self.path = path
        if path.is_dir():
            raise Unusable(f"{option}: expected a file, {path} is a folder")
        try:
            handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise Unusable(f"{option}: {path}: cannot be written: {error.strerror}") from error
        os.close(handle)
        self._draft = Path(name)

    def write(self, text: str) -> None:
        """Put the text in place."""
        self._draft.write_text(text, encoding="utf-8")
        self._draft.chmod(0o644)
        self._draft.replace(self.path)

    def close(self) -> None:
        """Leave nothing half-written behind."""
        self._draft.unlink(missing_ok=True)


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, kernels interpreted"
