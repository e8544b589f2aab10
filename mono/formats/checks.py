"""Checks that the formats share: dtype, shape, group size and finiteness, with errors that name the field."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_dtype(where: str, tensor: Tensor, expected: torch.dtype) -> None:
    """ValueError, naming both types, if `tensor` does not hold `expected`."""
    if tensor.dtype != expected:
        raise ValueError(f"{where} has dtype {tensor.dtype}, expected {expected}")


def check_shape(where: str, tensor: Tensor, expected: Sequence[int], why: str) -> None:
    """ValueError, naming both shapes and the rule, if `tensor` does not have the shape `expected`."""
    if tensor.shape != torch.Size(expected):
        raise ValueError(f"{where} has shape {list(tensor.shape)}, expected {list(expected)}: {why}")


def check_dimensions(where: str, tensor: Tensor, least: int) -> None:
    """ValueError if `tensor` has fewer than `least` dimensions."""
    if tensor.dim() < least:
        raise ValueError(f"{where} has shape {list(tensor.shape)}, expected at least {least} dimension(s)")


def check_same_device(where: str, tensors: Sequence[Tensor]) -> None:
    """ValueError if the tensors of one matrix lie on different devices."""
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"{where} lies on {' and '.join(sorted(devices))}, expected one device")


def check_groups(where: str, k: int, group: int) -> None:
    """ValueError if K is no whole number of scale blocks."""
    if k % group:
        raise ValueError(f"{where} has K = {k}, expected a multiple of the scale block, {group}")


def check_finite(where: str, x: Tensor) -> None:
    """ValueError, with the count, if `x` holds a NaN or an infinity.

    For weights only: it waits for the device. Activations are never checked; there a NaN travels on.
    """
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise ValueError(f"{where} holds {bad} non-finite values of {x.numel()}, expected none")
