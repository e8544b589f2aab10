"""Which module knows a checkpoint's architecture, and one call that loads a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from mono.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from mono.deployment import Deployment
from mono.layers import AnyWeights
from mono.models import minimax_m3
from mono.plan import Plan

MODELS: dict[str, ModuleType] = dict.fromkeys(minimax_m3.ARCHITECTURES, minimax_m3)


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model: its slots, one Weights for each, and where they came from."""

    plan: Plan
    weights: tuple[AnyWeights, ...]
    checkpoint: Checkpoint
    config: minimax_m3.Config
    deployment: Deployment


def architecture_of(checkpoint: Checkpoint) -> str:
    """The checkpoint's architecture, if it is known.

    Errors:  CheckpointError if `architectures` is missing or names none that is known; it lists those.
    """
    file = checkpoint.path / "config.json"
    named = checkpoint.config.get("architectures")
    for name in named if isinstance(named, list) else []:
        if isinstance(name, str) and name in MODELS:
            return name
    raise CheckpointError(f"{file}: architectures: expected one of {sorted(MODELS)}, got {named!r:.100}")


def load_model(
    source: Checkpoint | str | Path, deployment: Deployment, device: torch.device | str = "cpu"
) -> Model:
    """Plan and weights of a checkpoint, as `deployment` serves it.

    source:  an open checkpoint, or the folder of one.
    Errors:  CheckpointError for an architecture that is not known and for whatever is wrong with the
             checkpoint; ValueError for a deployment that does not fit the model.
    """
    checkpoint = source if isinstance(source, Checkpoint) else load_checkpoint(source)
    family = MODELS[architecture_of(checkpoint)]
    config = family.Config.of(checkpoint.config, str(checkpoint.path / "config.json"))
    routed_format, vocab_padded = family.stored_as(checkpoint, config)
    plan = family.plan_of(config, deployment, routed_format, vocab_padded)
    weights = family.load_weights(checkpoint, config, plan, deployment, device)
    return Model(plan, weights, checkpoint, config, deployment)
