"""The report: a page that a person reads in a minute, and everything as JSON."""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from audit.evidence import Evidence
from audit.floor import FACTOR, Judged
from audit.inputs import Unusable
from audit.logits import JudgedLogits
from audit.verdict import Outcome, Verdict

SCHEMA = "mono-audit-compare/1"
COLOURS = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.INCONCLUSIVE: "yellow"}
MOST_REASONS = 12
OWN_CACHE = ": own cache"


def show(
    console: Console, evidence: Evidence, verdict: Verdict, device: torch.device, seed: int
) -> dict[str, Any]:
    """Print the page, and return the run as JSON values."""
    subject = evidence.subject
    console.print()
    console.rule(f"{subject.name}: [bold {COLOURS[verdict.outcome]}]{verdict.outcome.name.lower()}")
    for why in verdict.reasons[:MOST_REASONS] or [_clean(verdict)]:
        console.print(Padding(Text(why), (0, 0, 0, 2)))
    if len(verdict.reasons) > MOST_REASONS:
        console.print(
            f"  and {len(verdict.reasons) - MOST_REASONS} more reasons (see --json)", highlight=False
        )
    prompts = len(evidence.prompts)
    widths = ", ".join(f"{count} at width {width}" for width, count in sorted(evidence.widths.items()))
    _lines(
        console,
        "run",
        {
            "steps": f"{evidence.steps} verify steps{f' ({widths})' if widths else ''} of"
            f" {prompts} prompt{'' if prompts == 1 else 's'}, {evidence.rows} rows",
            "contexts": f"up to {evidence.longest} tokens",
            "modes": ", ".join(evidence.modes),
            "device": f"{_device(device)}; torch {torch.__version__}, Triton {_triton()}; seed {seed}",
        },
    )
    if verdict.slots:
        console.print()
        console.print(_slots("slot by slot, against float64", verdict.slots))
    if verdict.whole:
        console.print()
        console.print(_slots("whole steps, against the reference", _worst_layers(verdict.whole)))
    for found in verdict.logits:
        _tokens(console, found)
    _power(console, evidence, verdict)
    console.print()
    console.print("not tested", style="bold")
    for what in verdict.not_tested:
        console.print(Padding(Text(what), (0, 0, 0, 2)))
    return run_as_json(evidence, verdict, device, seed)


def _clean(verdict: Verdict) -> str:
    bound = verdict.logits[0].unexplained  # a pass has compared tokens
    return (
        f"every rule holds; at 95 % confidence at most {bound.upper_effective:.2%} of verify steps emit other"
        f" tokens without a near tie (budget {verdict.budget:.2%})"
    )


def _lines(console: Console, title: str, lines: dict[str, str]) -> None:
    """A title, and labelled lines that wrap beside their label."""
    console.print()
    console.print(title, style="bold", highlight=False)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, line in lines.items():
        grid.add_row(Text(f"  {label}"), Text(line))
    console.print(grid)


def _slots(title: str, judged: list[Judged]) -> Table:
    """At most 80 columns wide for layer numbers of two digits."""
    table = Table(
        title=f"{title}; {judged[0].rows} rows",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
        caption=f"relative row errors; limit {FACTOR:g} x floor; ties: near-tied choices",
        caption_justify="left",
    )
    table.add_column("place and its worst output", no_wrap=True, vertical="bottom")
    for column in ("worst\nrow", "its\nfloor", "x floor", "mean\nx floor", "ties"):
        table.add_column(column, justify="right", no_wrap=True, vertical="bottom")
    places: dict[str, list[Judged]] = {}
    for found in judged:
        places.setdefault(found.place, []).append(found)
    for place, outputs in places.items():
        worst = max(outputs, key=lambda found: (len(found.reasons), found.ratio, found.mean_ratio))
        table.add_row(
            _label(place, worst.output),
            _short(worst.worst, ".1e"),
            _short(worst.row_floor, ".1e"),
            _short(worst.ratio, ".2f"),
            _short(worst.mean_ratio, ".2f"),
            str(sum(found.explained for found in outputs)),
            style="red" if any(found.reasons for found in outputs) else "",
        )
    return table


def _label(place: str, output: str) -> str:
    if place.endswith(OWN_CACHE):
        return f"{place.removesuffix(OWN_CACHE)} own {output}"
    return place if output == "tap" else f"{place} {output}"


def _short(x: float, form: str) -> str:
    """At most seven characters."""
    if x == 0:
        return "0"
    return f"{x:.1e}" if math.isfinite(x) and abs(x) >= 1000 else f"{x:{form}}"


def _worst_layers(judged: list[Judged]) -> list[Judged]:
    """Taps, and of the caches the failing places or else the worst one: the rest is in the JSON."""
    caches = [found for found in judged if found.place.endswith(OWN_CACHE)]
    failing = {found.place for found in caches if found.reasons}
    if caches and not failing:
        failing = {max(caches, key=lambda found: found.ratio).place}
    return [found for found in judged if found not in caches or found.place in failing]


def _tokens(console: Console, found: JudgedLogits) -> None:
    counted, noise = found.tally, found.noise
    accepted = " ".join(str(counted.accepted[a]) for a in sorted(counted.accepted))
    rows = max(counted.rows, 1)
    flips = sum(found.classes.values())
    lines = {
        "rows": f"{counted.rows}, of which {counted.decisive_rows} decisive, in {counted.steps} steps",
        "accepted": f"drafts 0..{len(counted.accepted) - 1}, steps of each: {accepted}; mean"
        f" {counted.accepted_mean:.2f} drafts",
        "steps": f"unlike the reference's in length (L0) {counted.length_differs}, in emitted tokens (L1)"
        f" {counted.tokens_differ}, in any top-1 (L2) {counted.top1_differs}; floor arms: in emitted tokens"
        f" {found.control_divergent} of {found.control_steps}",
        "top-1": f"equal on {(rows - flips) / rows:.2%} of rows (95 %: {found.agreement.low:.2%} to"
        f" {found.agreement.high:.2%}); {flips} flips, {found.expected:.1f} expected; floor arms"
        f" {found.control_flips} of {found.control_rows}",
        "margin": f"changes by {found.size:.1e} logits, root mean square (floor {noise.size:.1e}); robust"
        f" sigma {found.sigma:.1e} (floor {noise.sigma:.1e}); mean {found.shift.mean:+.1e} +-"
        f" {found.shift.error:.1e}",
        "divergence": f"KL in nats: median {found.kl[0]:.1e}, 99 % {found.kl[1]:.1e}, largest"
        f" {found.kl[2]:.1e} (floor {found.kl_floor[2]:.1e})",
    }
    if flips:
        classes = ", ".join(f"{kind} {count}" for kind, count in found.classes.items())
        before, at, after = counted.flips.values()
        lines["flips"] = f"{classes}; {before} before the last accepted row, {at} in it, {after} behind it"
    _lines(console, f"tokens, {found.mode}", lines)


def _power(console: Console, evidence: Evidence, verdict: Verdict) -> None:
    lines = {}
    if evidence.drafts.blocks:
        differ = evidence.drafts.differ
        floor = ", ".join(f"{arm} {count}" for arm, count in differ.items() if arm != "fast")
        lines["drafts"] = (
            f"after own taps {differ.get('fast', 0)} of {evidence.drafts.blocks} blocks differ"
            f" (floor arms: {floor})"
        )
    if verdict.logits:
        bound, every = verdict.logits[0].unexplained, verdict.logits[0].divergent
        lines["steps"] = (
            f"with other tokens that no near tie explains {bound.events} of {bound.trials}, at most"
            f" {bound.upper_effective:.2%} at 95 %; near ties counted {every.events}, at most"
            f" {every.upper_effective:.2%}"
        )
        lines["prompts"] = (
            f"with such a step {bound.clusters_hit} of {bound.clusters}, at most {bound.upper_clusters:.1%}"
        )
        lines["budget"] = f"{verdict.budget:.2%} takes {verdict.needed} clean steps"
    if lines:
        _lines(console, "power", lines)


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
        "triton": _triton(),
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
        """Errors: Unusable for anything there that is no file, or a folder that cannot be written."""
        self.path = path
        self.option = option
        if path.is_dir():
            raise Unusable(f"{option}: expected a file, {path} is a folder")
        if (
            path.exists() and not path.is_file()
        ):  # a device or a pipe: putting a file in its place destroys it
            raise Unusable(f"{option}: expected a file, {path} is a device or a pipe")
        self._draft().unlink()

    def write(self, text: str) -> None:
        """Put the text in place. Errors: Unusable if it cannot be written; then nothing is left behind."""
        draft = self._draft()
        try:
            draft.write_text(text, encoding="utf-8")
            draft.chmod(0o644)
            draft.replace(self.path)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            draft.unlink(missing_ok=True)

    def _draft(self) -> Path:
        try:
            handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        except OSError as error:
            raise self._unwritable(error) from error
        os.close(handle)
        return Path(name)

    def _unwritable(self, error: OSError) -> Unusable:
        return Unusable(f"{self.option}: {self.path}: cannot be written: {error.strerror}")


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "not installed"


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, kernels interpreted"
