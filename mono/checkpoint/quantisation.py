"""What `quantization_config` says about formats, held against what the tensors say.

The tensors decide. The configuration is used to catch a contradiction, where it is clear:

    quant_method          formats it may hold
    --------------------  --------------------------------------------------------------------
    none                  bf16
    mxfp8                 bf16, mxfp8; and nvfp4 (compressed-tensors) with moe_quant_algo NVFP4
    quark                 bf16, mxfp8, mxfp4, ptpc_fp8; an excluded layer is not mxfp4
    modelopt*             bf16, mxfp8, ptpc_fp8, nvfp4 (ModelOpt)
    compressed-tensors    bf16, mxfp8, ptpc_fp8, nvfp4 (compressed-tensors)
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mono.checkpoint.errors import CheckpointError
from mono.checkpoint.stored import Found

_LAYOUTS = {
    None: ("bf16",),
    "mxfp8": ("bf16", "mxfp8"),
    "quark": ("bf16", "mxfp8", "mxfp4", "ptpc_fp8"),
    "modelopt": ("bf16", "mxfp8", "ptpc_fp8", "nvfp4 modelopt"),
    "compressed-tensors": ("bf16", "mxfp8", "ptpc_fp8", "nvfp4 compressed-tensors"),
}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Formats that a checkpoint's configuration allows.

    method:   `quant_method`; None without a `quantization_config`.
    layouts:  what a matrix may be stored as, in the words of `Found.layout`.
    exclude:  patterns of layers that Quark left as they were.
    """

    file: Path
    method: str | None
    layouts: tuple[str, ...]
    exclude: tuple[str, ...] = ()

    @staticmethod
    def of(file: Path, config: Mapping[str, Any], text_config: Mapping[str, Any]) -> Quantisation:
        """From `quantization_config`, at the top level or in `text_config`.

        Errors:  CheckpointError if both hold one and differ, it has no known quant_method, or MX blocks are
                 not 1 x 32.
        """
        found = [
            c["quantization_config"]
            for c in (config, text_config)
            if c.get("quantization_config") is not None
        ]
        if not found:
            return Quantisation(file, None, _LAYOUTS[None])
        if any(other != found[0] for other in found):
            raise CheckpointError(f"{file}: quantization_config: expected one, got two that differ")
        said = found[0]
        method = said.get("quant_method") if isinstance(said, dict) else None
        known = "modelopt" if isinstance(method, str) and method.startswith("modelopt") else method
        if not isinstance(known, str) or known not in _LAYOUTS:
            methods = sorted(m for m in _LAYOUTS if m)
            raise CheckpointError(f"{file}: quant_method: expected one of {methods}, got {method!r}")
        layouts = _LAYOUTS[known]
        if known == "mxfp8":
            block = said.get("weight_block_size")
            if block is not None and block != [1, 32]:
                raise CheckpointError(f"{file}: weight_block_size: expected [1, 32], got {block!r}")
            if said.get("moe_quant_algo") == "NVFP4":
                layouts = (*layouts, "nvfp4 compressed-tensors")
        exclude = said.get("exclude", []) if known == "quark" else []
        if not isinstance(exclude, list) or not all(isinstance(pattern, str) for pattern in exclude):
            raise CheckpointError(f"{file}: exclude: expected a list of patterns, got {exclude!r:.80}")
        for pattern in exclude:
            try:
                _matches(pattern, "")
            except re.error as error:
                raise CheckpointError(
                    f"{file}: exclude: expected patterns, got {pattern!r}: {error}"
                ) from error
        return Quantisation(file, known, layouts, tuple(exclude))

    def check(self, found: Found) -> None:
        """CheckpointError if the configuration contradicts the format of a stored matrix."""
        if found.layout not in self.layouts:
            allowed = ", ".join(self.layouts)
            raise CheckpointError(
                f"{found}: expected {allowed} under quant_method {self.method!r}, got {found.layout}"
            )
        if found.layout == "mxfp4" and (pattern := self._excluded(found.prefix)):
            raise CheckpointError(
                f"{found}: expected no mxfp4, for {pattern!r} is excluded, got {found.layout}"
            )

    def _excluded(self, prefix: str) -> str | None:
        names = (prefix, prefix.replace("language_model.model.", "model."))
        return next((p for p in self.exclude if any(_matches(p, name) for name in names)), None)


def _matches(pattern: str, name: str) -> bool:
    """Quark's rules: `re:` a search; with `*` or `?` a glob over the name; else the name or its parent."""
    if pattern.startswith("re:"):
        return re.search(pattern.removeprefix("re:"), name) is not None
    if "*" in pattern or "?" in pattern:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*")
    return name == pattern or name.startswith(f"{pattern}.")
