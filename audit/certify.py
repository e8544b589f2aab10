"""From a passing run to a certificate: what `mono.bind` asks for."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from audit import evidence as seen
from audit.inputs import Unusable
from audit.verdict import Verdict
from mono.certificate import LEAST_KEY, Certificate, Evidence, Facts, issue

MOST_DAYS = 366


def certify(
    facts: Facts, evidence: seen.Evidence, verdict: Verdict, days: int, key: bytes | None
) -> Certificate:
    """Certify what a run saw, up to the longest context it reached.

    facts: `facts_of` what was run, taken before the run, so that a file changed meanwhile is not certified.
    days: how long it holds, from now. key: signs it, if there is one.
    Errors: CertificateError, a ValueError, for a run that does not certify; a failed one never does.
    """
    now = datetime.now(UTC)
    return issue(
        replace(facts, max_context=evidence.longest),
        evidence_of(evidence, verdict),
        now,
        now + timedelta(days=days),
        key,
    )


def evidence_of(evidence: seen.Evidence, verdict: Verdict) -> Evidence:
    """The few numbers of a run that a certificate carries."""
    ratios: dict[str, float] = {}
    for found in verdict.slots:
        ratios[found.place] = max(ratios.get(found.place, 0.0), found.ratio, found.mean_ratio)
    return Evidence(
        audit=f"audit.compare {_version()}",
        outcome=verdict.outcome.name.lower(),
        steps=evidence.steps,
        prompts=len(evidence.prompts),
        longest=evidence.longest,
        unexplained=max((found.unexplained.events for found in verdict.logits), default=0),
        bound=max((found.unexplained.upper_effective for found in verdict.logits), default=1.0),
        budget=verdict.budget,
        ratios=tuple(ratios.items()),
        widths=tuple(sorted(evidence.widths)),
        modes=evidence.modes,
        faults=None,  # planted faults are not part of a run yet
        performance_only=False,  # verify steps here are accepted by the serving rule, never by force
    )


def read_key(path: Path) -> bytes:
    """The operator's key: all bytes of a file.

    Errors: Unusable for a file that cannot be read or holds fewer than 16 bytes.
    """
    try:
        key = path.read_bytes()
    except OSError as error:
        raise Unusable(f"--sign-key: {path}: cannot be read: {error.strerror}") from error
    if len(key) < LEAST_KEY:
        raise Unusable(f"--sign-key: {path}: expected at least {LEAST_KEY} bytes, got {len(key)}")
    return key


def _version() -> str:
    try:
        return version("mono-decode")
    except PackageNotFoundError:
        return "uninstalled"
