"""What a certificate is for: everything that can change a number of a decode step."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mono.assembly import Assembly
    from mono.deployment import Deployment
    from mono.models import Model
    from mono.plan import Plan

PACKAGE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Facts:
    """What a certificate is for: everything that can change a number of a decode step.

    sources:      SHA-256 of every source file of `mono` and of the launch settings in use.
    plan:         SHA-256 of all slots with their sizes.
    checkpoint:   the checkpoint's digest, drafter included.
    deployment:   SHA-256 of the deployment without its widths and context limit, which follow in clear.
    device, capability:  "NVIDIA H200" and "sm_90", or "cpu" and "interpreted".
    widths:       row counts that steps run at. max_context: longest context, in tokens.
    sides:        every slot and the arm it runs on, in the plan's order.
    """

    sources: str
    plan: str
    checkpoint: str
    deployment: str
    device: str
    capability: str
    torch: str
    triton: str
    widths: tuple[int, ...]
    max_context: int
    sides: tuple[tuple[str, str], ...]


def facts_of(model: Model, assembly: Assembly, deployment: Deployment) -> Facts:
    """The facts of a loaded model. Reads every byte of the checkpoint once, and every source file."""
    import triton

    device, capability = device_facts(assembly.device)
    return Facts(
        sources=sources_digest(),
        plan=plan_fingerprint(model.plan),
        checkpoint=model.checkpoint.digest,
        deployment=deployment_fingerprint(deployment),
        device=device,
        capability=capability,
        torch=str(torch.__version__),
        triton=str(triton.__version__),
        widths=deployment.widths,
        max_context=deployment.max_context,
        sides=tuple((str(slot), side) for slot, side in zip(model.plan.slots, assembly.sides, strict=True)),
    )


def sources_digest(package: Path | None = None) -> str:
    """SHA-256 of all source files of a package, this one if None, by name, and of the launch settings.

    All of them, and not only the kernels: what reads, packs and rounds the weights decides numbers as well.
    The settings are those in memory, so that a table changed after import is seen too.
    """
    from mono.fast.tiles import TILES

    package = package or PACKAGE
    files = sorted(package.rglob("*.py"))
    if not files:
        raise FileNotFoundError(f"sources: expected source files under {package}, there are none")
    lines = [[str(f.relative_to(package)), hashlib.sha256(f.read_bytes()).hexdigest()] for f in files]
    return hashlib.sha256(canonical([lines, TILES])).hexdigest()


def plan_fingerprint(plan: Plan) -> str:
    """SHA-256 of every slot's layer, kind and sizes, in order."""
    slots = [[slot.layer, slot.kind, asdict(slot.spec)] for slot in plan.slots]
    return hashlib.sha256(canonical(slots)).hexdigest()


def deployment_fingerprint(deployment: Deployment) -> str:
    """SHA-256 of the deployment's fields, save widths and context limit: those may be fewer and shorter."""
    fields = {k: v for k, v in asdict(deployment).items() if k not in ("widths", "max_context")}
    return hashlib.sha256(canonical(fields)).hexdigest()


def device_facts(device: torch.device) -> tuple[str, str]:
    """Name and architecture of a device: ("cpu", "interpreted"), ("NVIDIA H200", "sm_90")."""
    if device.type == "cpu":
        return "cpu", "interpreted"
    if device.type != "cuda":
        return device.type, "unknown"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.name), str(properties.gcnArchName).split(":")[0]
    return str(properties.name), f"sm_{properties.major}{properties.minor}"


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces, ASCII. Floats are written so that they round-trip.

    Errors:  ValueError for NaN or an infinity, TypeError for what JSON cannot hold.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
