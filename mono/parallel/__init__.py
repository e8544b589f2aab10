"""Tensor parallelism: what the ranks tell each other."""

from mono.parallel.comm import SOLO, Comm

__all__ = ["SOLO", "Comm"]
