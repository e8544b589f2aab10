"""The evidence that a binding is allowed, as a file. It dies when anything it names changes.

`issue` turns facts and evidence into a certificate; whoever audited calls it, and nothing in `mono` makes
evidence. `read` trusts nothing about a file. `Certificate.covers` compares with what is about to be served.

The SHA-256 protects against accidents: a damaged file, an edited number, another build. Whoever can write
the file can also compute a SHA-256. Only the HMAC, with a key the writer does not have, tells who issued it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mono import strict_json as strict
from mono.facts import Facts, canonical, facts_of
from mono.strict_json import DATE, CertificateError, Reader

__all__ = [
    "Certificate",
    "CertificateError",
    "Evidence",
    "Facts",
    "facts_of",
    "issue",
    "read",
    "refuse_evidence",
]

SCHEMA = 1
LEAST_KEY = 16
EQUAL = ("checkpoint", "plan", "deployment", "device", "capability", "torch", "triton", "sources")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What an audit saw, in the few numbers that bind looks at and a reader asks for.

    audit:            the audit's name and version.
    outcome:          its verdict; only `pass` certifies.
    steps, prompts:   verify steps compared, and prompts they came from. longest: longest context of a step.
    unexplained:      steps whose emitted tokens differ and no near tie explains it.
    bound, budget:    upper 95 % bound of the rate of such steps, and the largest rate accepted.
    ratios:           every slot visited, and its worst error over its floor.
    widths, modes:    row counts and modes visited.
    faults:           planted faults detected, and planted; None if that was not measured.
    performance_only: True if any acceptance was forced: a measurement of speed, evidence of nothing.
    """

    audit: str
    outcome: str
    steps: int
    prompts: int
    longest: int
    unexplained: int
    bound: float
    budget: float
    ratios: tuple[tuple[str, float], ...]
    widths: tuple[int, ...]
    modes: tuple[str, ...]
    faults: tuple[int, int] | None
    performance_only: bool


@dataclass(frozen=True, slots=True)
class Certificate:
    """Facts, the evidence for them, when it holds, and its seals. Made by `issue` or `read`.

    issued, expires:  in UTC; it holds from the first and no longer at the second.

    sha256:  of the canonical form: JSON of all but the two seals, keys sorted, no spaces, ASCII.
    hmac:    HMAC-SHA256 of the same bytes with the operator's key, or None.

    Errors:  CertificateError, on construction, for evidence that does not carry the facts, dates out of order
             and a sha256 that is not the content's.
    """

    facts: Facts
    evidence: Evidence
    issued: datetime
    expires: datetime
    sha256: str
    hmac: str | None = None

    def __post_init__(self) -> None:
        if why := refuse_evidence(self.facts, self.evidence):
            raise CertificateError(f"evidence: {why}")
        if not self.issued < self.expires:
            raise CertificateError(f"expires: expected a date after {self.issued}, got {self.expires}")
        if not _equal(self.sha256, hashlib.sha256(self.sealed()).hexdigest()):
            raise CertificateError("sha256: is not that of the content, which has been altered")

    def sealed(self) -> bytes:
        """The canonical form."""
        return canonical(_body(self.facts, self.evidence, self.issued, self.expires))

    def unsigned(self, key: bytes | None) -> str | None:
        """Why the signature of `key` is not on it, or None; without a key none is asked for."""
        if key is None:
            return None
        if self.hmac is None:
            return "hmac: missing, and a key is set"
        if not _equal(self.hmac, _sign(self.sealed(), key)):
            return "hmac: is not that of the content under this key"
        return None

    def covers(self, facts: Facts, now: datetime) -> str | None:
        """None if `facts` may be served at `now`, otherwise the first mismatch, in words.

        Widths and context limit must lie within the certificate's; everything else must be equal.
        Errors:  ValueError for a `now` without a time zone.
        """
        _aware("now", now)
        mine = self.facts
        for name in EQUAL:
            a, b = getattr(mine, name), getattr(facts, name)
            if a != b:
                return f"{name}: the certificate is for {a:.40}, here it is {b:.40}"
        if [slot for slot, _ in mine.sides] != [slot for slot, _ in facts.sides]:
            return "sides: the certificate lists other slots"
        for (slot, a), (_, b) in zip(mine.sides, facts.sides, strict=True):
            if a != b:
                return f"{slot}: the certificate is for the {a} arm, here it is the {b} arm"
        for width in facts.widths:
            if width not in mine.widths:
                return f"width {width}: the certificate is for {', '.join(map(str, mine.widths))}"
        if facts.max_context > mine.max_context:
            return f"max_context {facts.max_context}: the certificate is for at most {mine.max_context}"
        at = now.astimezone(UTC).strftime(DATE)
        if now < self.issued:
            return f"not valid before {self.issued.strftime(DATE)}, it is {at}"
        if now >= self.expires:
            return f"expired at {self.expires.strftime(DATE)}, it is {at}"
        return None

    def text(self) -> str:
        """The content of the file that `read` reads."""
        body = _body(self.facts, self.evidence, self.issued, self.expires)
        return json.dumps(body | {"sha256": self.sha256, "hmac": self.hmac}, indent=1) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the file that `read` reads."""
        Path(path).write_text(self.text())


def issue(
    facts: Facts, evidence: Evidence, issued: datetime, expires: datetime, key: bytes | None = None
) -> Certificate:
    """Seal facts and evidence, signed if there is a key. Dates are kept to the second, in UTC.

    Errors:  CertificateError, a ValueError, for evidence that `refuse_evidence` turns down, values that the
             schema does not hold, dates out of order or without a zone, and a key of fewer than 16 bytes.
    """
    issued, expires = (
        _aware(name, date).astimezone(UTC).replace(microsecond=0)
        for name, date in (("issued", issued), ("expires", expires))
    )
    try:
        sealed = canonical(_body(facts, evidence, issued, expires))
    except (TypeError, ValueError) as error:
        raise CertificateError(f"certificate: {error}") from error
    seals = {
        "sha256": hashlib.sha256(sealed).hexdigest(),
        "hmac": None if key is None else _sign(sealed, key),
    }
    return _certificate(json.loads(sealed) | seals)  # what is issued can be read


def read(path: str | Path, key: bytes | None = None) -> Certificate:
    """The certificate in a file, if it is whole, unaltered and, where a key is given, signed with it.

    Errors:  CertificateError, one line naming the file: not a regular file (a link, a directory, a pipe), too
             large, not UTF-8 JSON, nested too deep, a field unknown, missing, twice or of another type,
             evidence that certifies nothing, another SHA-256, a signature missing or wrong.
    """
    try:
        certificate = _certificate(strict.parse(strict.content(path)))
        if why := certificate.unsigned(key):
            raise CertificateError(why)
    except CertificateError as error:
        raise CertificateError(f"{str(path)!r:.300}: {error}") from None
    return certificate


def refuse_evidence(facts: Facts, evidence: Evidence) -> str | None:
    """Why this evidence does not certify these facts, or None."""
    if evidence.performance_only:
        return "performance only: its acceptance was forced, so its tokens are not the model's"
    if evidence.outcome != "pass":
        return f"expected the outcome 'pass', got {evidence.outcome!r:.40}"
    if evidence.steps < 1 or evidence.prompts < 1:
        return f"nothing was compared: {evidence.steps} steps of {evidence.prompts} prompts"
    if not 0.0 <= evidence.bound <= evidence.budget < 1.0:
        return f"expected a bound within the budget of {evidence.budget}, got {evidence.bound}"
    if evidence.unexplained:
        return f"{evidence.unexplained} steps emitted other tokens"
    if evidence.faults is not None and evidence.faults[0] != evidence.faults[1]:
        return f"{evidence.faults[0]} of {evidence.faults[1]} planted faults were detected"
    fast = [slot for slot, side in facts.sides if side == "fast"]
    if not fast:
        return "no slot runs on the fast arm: there is nothing to certify"
    visited = dict(evidence.ratios)
    for slot in fast:
        if slot not in visited:
            return f"{slot}: runs on the fast arm and was not visited"
    for width in facts.widths:
        if width not in evidence.widths:
            return f"width {width}: not visited"
    if evidence.longest < facts.max_context:
        return f"max_context {facts.max_context}: the longest context visited is {evidence.longest}"
    return None


def _body(facts: Facts, evidence: Evidence, issued: datetime, expires: datetime) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "facts": asdict(facts),
        "evidence": asdict(evidence),
        "issued": issued.astimezone(UTC).strftime(DATE),
        "expires": expires.astimezone(UTC).strftime(DATE),
    }


def _equal(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(), b.encode())


def _sign(content: bytes, key: bytes) -> str:
    if len(key) < LEAST_KEY:
        raise CertificateError(f"key: expected at least {LEAST_KEY} bytes, got {len(key)}")
    return hmac.new(key, content, hashlib.sha256).hexdigest()


def _aware(name: str, date: datetime) -> datetime:
    if date.tzinfo is None:
        raise CertificateError(f"{name}: expected a date with a time zone, got {date}")
    return date


# The schema: a reader for every field.

_FACTS: Mapping[str, Reader] = {
    "sources": strict.digest,
    "plan": strict.digest,
    "checkpoint": strict.digest,
    "deployment": strict.digest,
    "device": strict.text,
    "capability": strict.text,
    "torch": strict.text,
    "triton": strict.text,
    "widths": strict.several(strict.count),
    "max_context": strict.count,
    "sides": strict.by_name(strict.one_of("reference", "fast")),
}
_EVIDENCE: Mapping[str, Reader] = {
    "audit": strict.text,
    "outcome": strict.text,
    "steps": strict.count,
    "prompts": strict.count,
    "longest": strict.count,
    "unexplained": strict.count,
    "bound": strict.number,
    "budget": strict.number,
    "ratios": strict.by_name(strict.number),
    "widths": strict.several(strict.count),
    "modes": strict.several(strict.text),
    "faults": strict.or_none(strict.several(strict.count, 2)),
    "performance_only": strict.switch,
}
_CERTIFICATE: Mapping[str, Reader] = {
    "schema": strict.one_of(SCHEMA),
    "facts": lambda where, value: Facts(**strict.an_object(where, value, _FACTS)),
    "evidence": lambda where, value: Evidence(**strict.an_object(where, value, _EVIDENCE)),
    "issued": strict.date,
    "expires": strict.date,
    "sha256": strict.digest,
    "hmac": strict.or_none(strict.digest),
}


def _certificate(value: Any) -> Certificate:
    fields = strict.an_object("", value, _CERTIFICATE)
    del fields["schema"]
    return Certificate(**fields)
