"""What every stored matrix answers to, whatever its format."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

Index = int | slice | Tensor | tuple[int | slice | Tensor, ...]


class Stored:
    """A matrix as stored: codes [..., N, K] and their scales. Each format is a frozen dataclass of it."""

    __slots__ = ()

    format_name: ClassVar[str]

    @property
    def shape(self) -> torch.Size:
        """The logical shape [..., N, K], counted in values and not in bytes."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the bytes lie."""
        return next(iter(self._tensors().values())).device

    def dequantise(self) -> Tensor:
        """The meaning of the stored bytes, fp32 [..., N, K]."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> Self:
        """The same matrix on `device`."""
        return self._each(lambda tensor: tensor.to(device))

    def __getitem__(self, index: Index) -> Self:
        """Index leading dimensions, never K: `table[e]` is one expert's matrix, `matrix[a:b]` its rows."""
        return self._each(lambda tensor: tensor[index])

    def rows(self, start: int, stop: int) -> Self:
        """Rows `start` to `stop` of N, whatever comes before N."""
        return self[(slice(None),) * (len(self.shape) - 2) + (slice(start, stop),)]

    def _tensors(self) -> dict[str, Tensor]:
        stored: Any = self  # a dataclass, which this base cannot declare
        values = {field.name: getattr(stored, field.name) for field in fields(stored)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        stored: Any = self
        changed: Self = replace(stored, **{name: change(value) for name, value in self._tensors().items()})
        return changed
