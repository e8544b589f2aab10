"""Models that can be loaded: configuration to plan, tensor names to weights."""

from mono.models.registry import MODELS, Model, architecture_of, load_model

__all__ = ["MODELS", "Model", "architecture_of", "load_model"]
