"""The winning token of each row."""

from __future__ import annotations

import torch
from torch import Tensor


def top1(logits: Tensor, vocab: int) -> Tensor:
    """Token of the largest logit among the `vocab` true ones, the lowest id on a tie.

    Shapes:    logits [T, V] fp32 with V >= vocab. Returns [T] int64.
    NaN:       a row with a NaN logit yields its first NaN's id; whoever decides on rows checks that
               the live ones are finite.
    """
    true = logits[:, :vocab]
    best = true.amax(dim=1, keepdim=True)
    hit = (true == best) | true.isnan()
    return torch.where(hit, torch.arange(vocab, device=logits.device), vocab).amin(dim=1)
