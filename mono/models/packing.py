"""Put stored matrices of one format together, value for value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from mono.formats import Matrix, Nvfp4


def rows_of(matrices: Sequence[Matrix]) -> Matrix:
    """One matrix [sum of N, K] whose rows are those of several [N, K], in order.

    A global scale of NVFP4 becomes one per row, so each row keeps its own.
    Errors:  ValueError unless all have one format.
    """
    if len(matrices) == 1:
        return matrices[0]
    return _together([_per_row(matrix) for matrix in matrices], torch.cat)


def table_of(matrices: Sequence[Matrix]) -> Matrix:
    """A table [E, N, K] of matrices [N, K]; a global scale becomes [E], or [E, N] if it is one per row.

    Errors:  ValueError unless all have one format and one shape.
    """
    return _together(matrices, torch.stack)


def _per_row(matrix: Matrix) -> Matrix:
    if not isinstance(matrix, Nvfp4):
        return matrix
    scale = matrix.global_scale
    return replace(matrix, global_scale=scale if scale.dim() else scale.repeat(matrix.shape[0]))


def _together(matrices: Sequence[Matrix], join: Callable[[list[Tensor]], Tensor]) -> Matrix:
    formats = sorted({matrix.format_name for matrix in matrices})
    if len(formats) > 1:
        raise ValueError(f"packing: expected one format, got {formats}")
    first: Any = matrices[0]
    joined = {
        field.name: join([getattr(matrix, field.name) for matrix in matrices])
        for field in fields(first)
        if isinstance(getattr(first, field.name), Tensor)
    }
    whole: Matrix = replace(first, **joined)
    return whole
