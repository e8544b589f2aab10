"""Fused decode for MiniMax-M3-class models, which an audit must certify before it may run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mono.binding import Bound, bind
    from mono.certificate import Certificate
    from mono.checkpoint import load_checkpoint
    from mono.deployment import Deployment
    from mono.refusal import Refused

_HOMES = {
    "Bound": "mono.binding",
    "Certificate": "mono.certificate",
    "Deployment": "mono.deployment",
    "Refused": "mono.refusal",
    "bind": "mono.binding",
    "load_checkpoint": "mono.checkpoint",
}

__all__ = ["Bound", "Certificate", "Deployment", "Refused", "bind", "load_checkpoint"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for, so that importing `mono` costs nothing."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mono' has no attribute {name!r}")
