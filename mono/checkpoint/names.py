"""Tensor names: many spellings in the field, one here."""

from __future__ import annotations

import re

DRAFTER_PREFIX = "language_model.model.dspark."
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")

_TEXT_ONLY = ("model.layers.", "model.embed_tokens.", "model.norm.", "model.dspark.", "lm_head.")
_EXPERT_ALIASES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EXPERT = re.compile(r"(\.experts\.\d+\.)(gate_proj|up_proj|down_proj)\.")


def canonical(name: str) -> str:
    """The one spelling of a stored tensor's name.

    model.language_model.X               ->  language_model.X
    model.layers.X, lm_head.X, ...       ->  language_model. before it (a text-only checkpoint)
    experts.E.gate_proj, up_proj, down_proj  ->  experts.E.w1, w3, w2
    """
    if name.startswith("model.language_model."):
        name = name.removeprefix("model.")
    elif name.startswith(_TEXT_ONLY):
        name = f"language_model.{name}"
    return _EXPERT.sub(lambda m: f"{m[1]}{_EXPERT_ALIASES[m[2]]}.", name)


def is_text(name: str) -> bool:
    """Whether a canonical name belongs to the text decoder, and not to the vision tower or its bridges."""
    return not name.removeprefix("model.").startswith(OTHER_PARTS)
