"""Specs, weights, steps and carries for tests of whole layers."""

from __future__ import annotations

import torch
from torch import Tensor

from mono.interface import Carry
from mono.step import Step

EPS = 1e-6
SWIGLU = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


def norm_weight(hidden: int) -> Tensor:
    """A zero-centred norm weight."""
    return (torch.randn(hidden) * 0.1).bfloat16()


def step_of(rows: int, padding: int = 0, vocab: int = 50) -> Step:
    """A step of one-row requests, the last `padding` of them padding with any token."""
    slots = torch.arange(rows)
    tokens = torch.randint(vocab, (rows,))
    if padding:
        slots[-padding:] = -1
        tokens[-padding:] = torch.tensor([-5, 2**40, 7])[torch.arange(padding) % 3]
    visible = torch.where(slots >= 0, 1, 0).int()
    return Step(tokens, torch.zeros(rows).long(), slots, visible, torch.zeros(rows, 1).int(), 1)


def carry_of(rows: int, hidden: int, partial: bool = True) -> Carry:
    """A residual stream, and the last slot's output."""
    return Carry(
        torch.randn(rows, hidden).bfloat16(), torch.randn(rows, hidden).bfloat16() if partial else None
    )


def to(carry: Carry, device: str) -> Carry:
    """The carry on another device."""
    return Carry(carry.residual.to(device), None if carry.partial is None else carry.partial.to(device))


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 error of each row; zero for equal rows."""
    apart = (got.double().cpu() - want.double().cpu()).norm(dim=1)
    return torch.where(apart == 0, 0.0, apart / want.double().cpu().norm(dim=1))
