"""The fixed-width verify step: the anchor and every draft of each request, in one pass of the target."""

from __future__ import annotations

import torch
from torch import Tensor

from mono.deployment import Deployment
from mono.dspark.drafter_spec import DrafterSpec
from mono.step import Step


def verify_step(
    anchors: Tensor, drafts: Tensor, positions: Tensor, block_tables: Tensor, block_size: int
) -> Step:
    """The step that judges `drafts`: 1 + draft_len rows a request, whatever becomes of them.

    Row j of a request reads the anchor (j = 0) or d_j at position P + j, writes its key there, and sees
    P + j + 1 keys. All drafts' keys are written; none needs to be taken back when its draft is rejected.
    With A accepted, the keys at P + A + 1 .. P + draft_len are stale, and the next verify step starts at
    exactly P + A + 1 and writes draft_len + 1 positions from there, so it overwrites every stale key before
    any row reads it: a row sees no key behind its own position. Rewinding is moving the position.
    Index keys are per token as well, so the same holds for them.

    Shapes:  anchors [B], drafts [B, draft_len], positions [B] int64, P of each request;
             block_tables [B, M] int32, covering P + draft_len.
    Errors:  ValueError naming the request and its positions if the table has no page for them, or the
             argument of another shape or dtype.
    """
    B, length = drafts.shape
    for name, x, shape in (("anchors", anchors, (B,)), ("positions", positions, (B,))):
        if tuple(x.shape) != shape:
            raise ValueError(f"verify: {name}: expected {list(shape)}, got {list(x.shape)}")
    for name, x in (("anchors", anchors), ("drafts", drafts), ("positions", positions)):
        if x.dtype != torch.int64:
            raise ValueError(f"verify: {name}: expected int64, got {x.dtype}")
    room = block_tables.shape[1] * block_size
    for b, P in enumerate(positions.tolist()):
        if P < 0 or P + length >= room:
            raise ValueError(
                f"verify: request {b}: expected positions from 0 to {room - 1}, got {P} to {P + length}"
            )
    tokens = torch.cat([anchors[:, None], drafts], dim=1)  # [B, q]
    return Step.of(tokens, (positions + 1 + length).int(), block_tables, block_size)


def refuse_verify(
    deployment: Deployment, spec: DrafterSpec, synthetic_length: float | None = None
) -> list[str]:
    """Every reason why this deployment cannot verify this drafter's blocks at a fixed width; empty if none.

    A fixed width is compiled in: row j of request r is row r x q + j, and graphs exist for whole requests.
    """
    reasons = []
    q = spec.block + 1
    if deployment.verify == "confidence":
        reasons.append(
            "verify: confidence-scheduled DSpark gives each request its own number of rows; only fixed-width"
            f" verify of {q} rows a request is built"
        )
    if deployment.verify == "ragged":
        reasons.append(
            f"verify: ragged DSpark shifts every later request's rows; only fixed-width verify of {q} rows a"
            " request is built"
        )
    if deployment.verify == "off":
        return reasons
    if deployment.draft_len != spec.block:
        reasons.append(
            f"verify: draft_len {deployment.draft_len} is not the drafter's block of {spec.block}: another"
            " width is another drafter"
        )
    if not any(width % q == 0 for width in deployment.widths):
        reasons.append(
            f"verify: no width of {list(deployment.widths)} holds whole requests of {q} rows; want a multiple"
            f" of {q}"
        )
    if synthetic_length is not None:
        if deployment.verify != "fixed":
            reasons.append(
                f"verify: synthetic acceptance of {synthetic_length} cannot be combined with"
                f" {deployment.verify} verify, which may cut the rows below the forced length"
            )
        if not 1 <= synthetic_length <= q:
            reasons.append(f"verify: synthetic acceptance of {synthetic_length} is not within 1 to {q}")
    return reasons
