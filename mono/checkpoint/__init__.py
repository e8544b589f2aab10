"""Checkpoints of the field's layout: safetensors files, `config.json`, and the names in them."""

from mono.checkpoint.errors import CheckpointError
from mono.checkpoint.reader import Checkpoint, load_checkpoint
from mono.checkpoint.writer import write_checkpoint

__all__ = ["Checkpoint", "CheckpointError", "load_checkpoint", "write_checkpoint"]
