"""Weights that are not quantised, behind the same interface as those that are."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mono.formats.checks import check_dimensions, check_dtype
from mono.formats.stored import Stored


@dataclass(frozen=True, slots=True, eq=False)
class Bf16(Stored):
    """A bf16 matrix.

    values:  bf16 [..., N, K].
    Value:   itself.
    Errors:  ValueError for another dtype or no dimension.
    """

    format_name: ClassVar[str] = "bf16"

    values: Tensor

    def __post_init__(self) -> None:
        check_dtype("bf16: values", self.values, torch.bfloat16)
        check_dimensions("bf16: values", self.values, 1)

    @property
    def shape(self) -> torch.Size:
        """[..., N, K]."""
        return self.values.shape

    def dequantise(self) -> Tensor:
        """The values in fp32, exact."""
        return self.values.float()
