"""What is wrong with a checkpoint, in one line."""

from __future__ import annotations


class CheckpointError(ValueError):
    """Names the file, the tensor or field, what was expected and what came."""
