"""Certificates for tests. The evidence here is invented: only an audit may do that for a served model."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from mono.assembly import Assembly, assemble
from mono.certificate import Certificate, Evidence, Facts, facts_of, issue
from mono.deployment import Deployment
from mono.models import Model, load_model

TINY = Path(__file__).parents[2] / "audit" / "tiny"
SERVED = Deployment(max_context=512)
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
KEY = b"an operator's key of many bytes"


@cache
def embedded(name: str, deployment: Deployment = SERVED) -> Model:
    """An embedded checkpoint, loaded once."""
    return load_model(TINY / name, deployment)


def facts(name: str, deployment: Deployment = SERVED) -> Facts:
    model = embedded(name, deployment)
    assembly = assemble(model.plan, model.weights, deployment, "fast")
    assert isinstance(assembly, Assembly)
    return facts_of(model, assembly, deployment)


def evidence(of: Facts, **changes: Any) -> Evidence:
    """What an audit that passed and visited everything would hand over, but for `changes`."""
    passed = Evidence(
        audit="a test's 1",
        outcome="pass",
        steps=320,
        prompts=40,
        longest=of.max_context,
        unexplained=0,
        bound=0.0094,
        budget=0.01,
        ratios=tuple((slot, 1.25) for slot, side in of.sides if side == "fast"),
        widths=of.widths,
        modes=("local", "shadow", "forced"),
        faults=(40, 40),
        performance_only=False,
    )
    return replace(passed, **changes)


def certificate(of: Facts, key: bytes | None = None) -> Certificate:
    """Valid for 30 days from an hour before NOW."""
    return issue(of, evidence(of), NOW - timedelta(hours=1), NOW + timedelta(days=30), key)
