"""The taps of a target step, kept where the drafter reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mono.decode import check_taps


class Taps:
    """A fixed buffer for the residual streams that a drafter is conditioned on.

    Tap t is the residual stream *after* decoder layer t: that layer's attention and MLP outputs in it,
    summed over the ranks, no norm applied; of the last layer, what goes into the final norm. -1 is the
    embedding. `mono.decode.run` yields the taps of a step side by side; `hold` copies them here, so they
    outlive the step's own buffers and keep their address under a captured graph.

    ids:     decoder layers, strictly increasing.
    buffer:  [rows, m x hidden] bf16, contiguous; column band i is tap ids[i].
    """

    def __init__(self, ids: Sequence[int], layers: int, hidden: int, buffer: Tensor) -> None:
        """Bind `buffer` to the taps `ids` of a target of `layers` decoder layers.

        Errors:  ValueError naming what was expected and what came: ids out of order or range, no id, another
                 dtype, shape or layout.
        """
        check_taps(ids, layers)
        if not ids:
            raise ValueError("taps: expected at least one id, got none")
        if buffer.dtype != torch.bfloat16:
            raise ValueError(f"taps: buffer: expected bfloat16, got {buffer.dtype}")
        if buffer.ndim != 2 or buffer.shape[1] != len(ids) * hidden:
            raise ValueError(
                f"taps: buffer: expected [rows, {len(ids)} x {hidden} = {len(ids) * hidden}],"
                f" got {list(buffer.shape)}"
            )
        if not buffer.is_contiguous():
            raise ValueError(f"taps: buffer: expected contiguous rows, got strides {buffer.stride()}")
        self.ids = tuple(ids)
        self.hidden = hidden
        self.buffer = buffer

    @staticmethod
    def empty(
        ids: Sequence[int], layers: int, hidden: int, rows: int, device: torch.device | str = "cpu"
    ) -> Taps:
        """A buffer of its own, NaN until a step's taps are held."""
        width = len(ids) * hidden
        buffer = torch.full((rows, width), float("nan"), dtype=torch.bfloat16, device=device)
        return Taps(ids, layers, hidden, buffer)

    @property
    def rows(self) -> int:
        """Most rows a step may have."""
        return self.buffer.shape[0]

    def hold(self, taps: Tensor) -> Tensor:
        """Copy a step's taps [n, m x hidden] bf16 into the first n rows; returns those rows.

        Errors:  ValueError for more rows than the buffer has, another width or another dtype.
        """
        n = taps.shape[0]
        if taps.dtype != torch.bfloat16 or tuple(taps.shape[1:]) != tuple(self.buffer.shape[1:]):
            raise ValueError(
                f"taps: expected bfloat16 [n, {self.buffer.shape[1]}], got {taps.dtype} {list(taps.shape)}"
            )
        if n > self.rows:
            raise ValueError(f"taps: expected at most {self.rows} rows, got {n}")
        held = self.buffer[:n]
        held.copy_(taps)
        return held

    def tap(self, layer: int) -> Tensor:
        """[rows, hidden], the band of the tap after decoder layer `layer`, a view."""
        if layer not in self.ids:
            raise ValueError(f"taps: no tap after layer {layer}, there are {list(self.ids)}")
        at = self.ids.index(layer) * self.hidden
        return self.buffer[:, at : at + self.hidden]
