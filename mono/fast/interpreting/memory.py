"""What a launch may touch, and which program touched it."""

import ctypes
from collections.abc import Iterable

import numpy as np
import torch

from mono.fast.interpreting.formats import Array


class KernelMemoryError(AssertionError):
    """A kernel's access was out of bounds, misaligned, or in a race with another program."""


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """First and one past the last address of a tensor's elements."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


class Memory:
    """The bytes that a launch may touch, in spans: each tensor from its first to its last element, merged
    where they overlap; with `races`, also which program wrote or read each byte.

    epoch:     grows at each program and barrier: what was stored in an earlier epoch may be read back.
    acquired:  the running program has synchronised by an atomic, and may touch what others stored.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], races: bool) -> None:
        spans: list[list[int]] = []
        for start, end in sorted({_extent(t) for t in tensors if t.numel()}):
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(end, spans[-1][1])
            else:
                spans.append([start, end])
        self._starts = np.array([start for start, _ in spans], np.int64)
        self._ends = np.array([end for _, end in spans], np.int64)
        self._views: dict[tuple[int, np.dtype[np.generic]], Array] = {}
        # per byte: program + 1 that wrote it, the epoch when, program + 1 that read it (-1: several)
        self._marks = [np.zeros((3, end - start), np.int32) for start, end in spans] if races else None
        self.grid_idx = (0, 0, 0)
        self.program, self.epoch, self.acquired = 0, 0, False

    def start_program(self, program: int, grid_idx: tuple[int, int, int]) -> None:
        """The accesses that follow are of this program, `grid_idx` as (x, y, z)."""
        self.program, self.grid_idx, self.acquired = program, grid_idx, False
        self.epoch += 1

    def view(self, span: int, dtype: np.dtype[np.generic]) -> Array:
        """A span as an array of `dtype`."""
        found = self._views.get((span, dtype))
        if found is None:
            start, end = int(self._starts[span]), int(self._ends[span])
            size = (end - start) // dtype.itemsize * dtype.itemsize
            found = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(start)), dtype)
            self._views[span, dtype] = found
        return found

    def locate(self, address: Array, size: int, kind: str) -> tuple[int, Array]:
        """(span, element indices in it) of int64 addresses of elements of `size` bytes; span -1 if several.

        Raises KernelMemoryError on an access out of bounds or misaligned. `kind` is load, store or atomic.
        """
        low, high = int(address.min()), int(address.max())
        span = int(self._starts.searchsorted(low, side="right")) - 1
        if span < 0 or high + size > self._ends[span]:
            self._check_each(address, size, kind)
            span = -1
        if size > 1 and (address & (size - 1)).any():
            raise KernelMemoryError(f"misaligned {kind} in program {self.grid_idx}: elements of {size} bytes")
        if self._marks is not None and kind != "atomic":
            self._mark(address, kind)
        if span < 0:
            return -1, address
        offset = address - self._starts[span]
        if size > 1:
            offset >>= size.bit_length() - 1
        return span, offset

    def _check_each(self, address: Array, size: int, kind: str) -> None:
        if not len(self._starts):
            raise KernelMemoryError(f"{kind} in program {self.grid_idx}: the launch has no tensor arguments")
        span = self._starts.searchsorted(address, side="right") - 1
        bad = (span < 0) | (address + size > self._ends[np.maximum(span, 0)])
        if bad.any():
            near, where = max(int(span[bad][0]), 0), int(address[bad][0])
            start, end = int(self._starts[near]), int(self._ends[near])
            raise KernelMemoryError(
                f"{kind} out of bounds in program {self.grid_idx}: {int(bad.sum())} of {address.size} lanes; "
                f"byte {where - start} of a tensor of {end - start} bytes"
            )

    def _mark(self, address: Array, kind: str) -> None:
        """Record a load or store of these addresses; raise on a race."""
        assert self._marks is not None
        me = self.program + 1
        spans = self._starts.searchsorted(address, side="right") - 1
        for span in np.unique(spans):
            offset = address[spans == span] - self._starts[span]
            wrote, when, read = self._marks[span]
            writer, reader = wrote[offset], read[offset]
            others = writer[(writer != 0) & (writer != me)]
            if kind == "store":
                if others.size and not self.acquired:
                    raise KernelMemoryError(
                        f"race: programs {others[0] - 1} and {me - 1} store to one address"
                    )
                if ((reader != 0) & (reader != me)).any() and not self.acquired:
                    raise KernelMemoryError(f"race: program {me - 1} overwrites what another program reads")
                wrote[offset], when[offset] = me, self.epoch
            else:
                if others.size and not self.acquired:
                    raise KernelMemoryError(
                        f"race: program {me - 1} reads what program {others[0] - 1} stores"
                    )
                if ((writer == me) & (when[offset] == self.epoch)).any():
                    raise KernelMemoryError(
                        f"race: program {me - 1} reads back its own store without a tl.debug_barrier()"
                    )
                read[offset] = np.where((reader == 0) | (reader == me), me, -1)
