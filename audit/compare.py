"""Hold the fast arms against the reference over real decode steps. The exit code is the verdict.

    python -m audit.compare                                  the embedded M3.1, its own prompts
    python -m audit.compare --checkpoint all --steps 320 --budget 0.01 --device cuda
    python -m audit.compare --checkpoint /models/m3.1 --prompts prompts.jsonl --json report.json
    python -m audit.compare --modes local --json - | jq .runs[0].verdict

Exit codes: 0 pass, 1 fail, 2 inconclusive (too few steps for the budget, or a mode left out), 3 unusable
input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from audit.certify import MOST_DAYS, certify, read_key
from audit.evidence import MODES, Mode, gather
from audit.inputs import EMBEDDED, Unusable, as_prompts, embedded_prompts, open_subject, read_prompts
from audit.report import WholeFile, as_json, show
from audit.steps import MOST_ROUNDS, Schedule
from audit.verdict import Outcome, Verdict, judge
from mono.certificate import Certificate, facts_of
from mono.deployment import Prefix

INTERRUPTED = 130  # as a shell says of a program that Ctrl-C ended
ROUNDS = 8  # verify steps of one prompt: few, so that steps come from many prompts
# prompts decoded together and rows of a prefill chunk: a GPU waits for launches, a CPU for memory
TOGETHER = {"cpu": (8, 128), "cuda": (32, 512)}
SPARE_PROMPTS = 8  # texts that end early leave their steps to these


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and return its exit code."""
    quiet = Console(stderr=True)
    try:
        options = _parser().parse_args(argv)
        return int(_compare(options, quiet))
    except Unusable as error:
        quiet.print(
            f"audit.compare: {error}", style="bold red", highlight=False, soft_wrap=True, markup=False
        )
        return int(Outcome.UNUSABLE)
    except KeyboardInterrupt:
        quiet.print("audit.compare: interrupted", style="bold red", highlight=False)
        return INTERRUPTED


def _compare(options: argparse.Namespace, errors: Console) -> Outcome:
    _check(options)
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # many small operations: a second thread costs more than it brings
    key = None if options.sign_key is None else read_key(Path(options.sign_key))
    file = None if options.json in (None, "-") else WholeFile(Path(options.json), "--json")
    sealed = None if options.certificate is None else WholeFile(Path(options.certificate), "--certificate")
    texts = None if options.prompts is None else read_prompts(Path(options.prompts))
    names = list(EMBEDDED) if options.checkpoint == "all" else [options.checkpoint]
    console = errors if options.json == "-" else Console()
    outcomes, runs = [], []
    for name in names:
        verdict, run, certificate = _one(name, options, texts, device, console, errors, key)
        outcomes.append(verdict.outcome)
        runs.append(run)
    if options.json == "-":
        sys.stdout.write(as_json(runs))
    elif file is not None:
        file.write(as_json(runs))
    if sealed is not None and certificate is not None:
        sealed.write(certificate.text())
        console.print(f"certificate: {options.certificate}, until {certificate.expires:%Y-%m-%d}")
    return next(o for o in (Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS) if o in outcomes)


def _one(
    name: str,
    options: argparse.Namespace,
    texts: list[tuple[str, str | list[int]]] | None,
    device: torch.device,
    console: Console,
    errors: Console,
    key: bytes | None,
) -> tuple[Verdict, dict[str, object], Certificate | None]:
    subject, candidate, model = open_subject(name, device, options.widths, options.prefix)
    wanted = options.certificate is not None
    facts = facts_of(model, candidate.assembly, subject.deployment) if wanted else None
    if texts is None:
        prompts = embedded_prompts(-(-options.steps // ROUNDS) + SPARE_PROMPTS, options.seed)
        prompts = as_prompts([(p.name, list(p.ids)) for p in prompts], subject, "prompts")
        rounds = ROUNDS
    else:
        prompts = as_prompts(texts, subject, f"prompts: {options.prompts}")
        rounds = min(max(ROUNDS, -(-options.steps // len(prompts))), MOST_ROUNDS // 2)
    together, prefill_rows = TOGETHER[device.type]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(f"{name}: verify steps", total=options.steps)
        evidence = gather(
            subject,
            candidate,
            prompts,
            Schedule(options.steps, rounds, together=together, prefill_rows=prefill_rows),
            options.modes,
            options.seed,
            lambda done, wanted: progress.update(task, completed=min(done, wanted)),
        )
    verdict = judge(evidence, options.budget)
    certificate = None
    if facts is not None and verdict.outcome is Outcome.PASS:
        certificate = certify(facts, evidence, verdict, options.days, key)
    return verdict, show(console, evidence, verdict, device, options.seed), certificate


def _check(options: argparse.Namespace) -> None:
    if options.steps < 1:
        raise Unusable(f"--steps: expected at least 1, got {options.steps}")
    if not 0.0 < options.budget < 1.0:
        raise Unusable(f"--budget: expected a rate between 0 and 1, got {options.budget}")
    if options.certificate is not None and options.checkpoint == "all":
        raise Unusable("--certificate: a certificate is for one checkpoint, got --checkpoint all")
    if options.sign_key is not None and options.certificate is None:
        raise Unusable("--sign-key: expected --certificate as well, there is none")
    if not 1 <= options.days <= MOST_DAYS:
        raise Unusable(f"--days: expected 1 to {MOST_DAYS}, got {options.days}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise Unusable("--device: expected a GPU for cuda, there is none")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Unusable(message)


def _modes(text: str) -> tuple[Mode, ...]:
    names = text.split(",")
    if not names or any(name not in MODES for name in names):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(MODES)}, got {text}")
    return tuple(mode for mode in MODES if mode in names)


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    if not widths or sorted(set(widths)) != list(widths) or any(w < 8 or w % 8 for w in widths):
        raise argparse.ArgumentTypeError(f"expected ascending multiples of 8 rows, got {text}")
    return widths


def _parser() -> argparse.ArgumentParser:
    summary, _, rest = (__doc__ or "").partition("\n\n")
    parser = _Parser(
        prog="python -m audit.compare",
        description=f"{summary} Defaults are in brackets.",
        epilog="examples:\n" + rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=True,
    )
    add = parser.add_argument
    add("--checkpoint", default="m3.1", metavar="PATH", help="a folder, or m3, m3.1, all: embedded (m3.1)")
    add("--prompts", metavar="FILE", help="a prompt a line: text, or JSON with text or ids (embedded ones)")
    add("--steps", type=int, default=64, metavar="N", help="verify steps; one request's verify is one (64)")
    add(
        "--budget",
        type=float,
        default=0.05,
        metavar="P",
        help="largest rate of steps with other tokens, 0 to 1 (0.05)",
    )
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu",
        help="where both arms run; on the cpu the fast arm's kernels are interpreted")  # fmt: skip
    add("--modes", type=_modes, default=MODES, metavar="LIST",
        help="local (slot by slot), shadow (whole step), forced (own caches, taps) (all)")  # fmt: skip
    add("--widths", type=_widths, default=(8, 16), metavar="LIST", help="rows a step is built for (8,16)")
    add(
        "--prefix",
        choices=get_args(Prefix),
        default="reference",
        help="arm of a sparse dense-MLP prefix (reference)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of embedded prompts and page order (0)")
    add("--json", metavar="PATH", help="write the whole report there, or - for standard output")
    add(
        "--certificate",
        metavar="PATH",
        help="write the certificate there that mono.bind asks for; on a pass only",
    )
    add("--sign-key", metavar="FILE", help="sign it with the bytes of this file")
    add("--days", type=int, default=90, metavar="N", help="how long it holds (90)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
