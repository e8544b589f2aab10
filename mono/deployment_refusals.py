"""May this deployment ever run fused? From configuration alone: no weights, no device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mono.deployment import Deployment
from mono.eligibility import ALWAYS, WIDTHS

if TYPE_CHECKING:
    from mono.models.minimax_m3_config import Config

MOST_CONTEXT = 1 << 20  # tokens that block scores span
DRAFTS = 7

# what an engine may have switched on, and the values at which it is off
PARALLEL: Mapping[str, tuple[object, ...]] = {
    "data_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "expert_parallel": (False,),
    "decode_context_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "expert_load_balancing": (False,),
    "lora": (False,),
    "kv_transfer_connector": (False,),
    "sleep_mode": (False,),
    "plugin_mode": (False,),
}
BATCHING: Mapping[str, tuple[object, ...]] = {"two_batch_overlap": (False,), "micro_batching": (False,)}
READ_BELOW = ("block_size", "index_cache_dtype", "cuda_graphs", "speculative_method")


def refuse_deployment(
    architecture: str,
    deployment: Deployment,
    features: Mapping[str, object] | None = None,
    config: Config | None = None,
) -> tuple[str, ...]:
    """Every reason against this deployment, in a fixed order; empty if there is none.

    features:  what the engine has, by name; None is unset. Names not known here refuse unless they are False:
               block_size             tokens of a page of the KV cache
               index_cache_dtype      unset, it is the KV cache's
               cuda_graphs            `none`, `full`
               speculative_method     `dspark`
               and those of PARALLEL and BATCHING.
    config:    the model's; its block size, positions and shared expert are compared where it is given.
    """
    from mono.models import MODELS

    features = {name: value for name, value in (features or {}).items() if value is not None}
    reasons = []
    if architecture not in MODELS:
        reasons.append(f"architecture: {architecture!r:.80} is not known; known are {', '.join(MODELS)}")
    if deployment.tp_size != 1:
        reasons.append(f"tp_size: TP {deployment.tp_size} (want 1)")
    reasons += _on(features, PARALLEL)
    known = {*PARALLEL, *BATCHING, *READ_BELOW}
    reasons += [
        f"{name!r:.60}: is not a feature that is known to be supported, got {features[name]!r:.60}"
        for name in sorted(features, key=str)
        if name not in known and features[name] is not False
    ]
    reasons += _caches(deployment, features, config)
    if deployment.linears != "ptpc_fp8":
        reasons.append(f"linears: attention and dense linears are {deployment.linears!r} (want 'ptpc_fp8')")
    if deployment.shared_expert != "fused" and (config is None or config.shared_experts):
        reasons.append(
            "shared_expert: is not fused into the MXFP4 experts; deployment.shared_expert='fused' does it"
        )
    reasons += _on(features, BATCHING)
    graphs = features.get("cuda_graphs", "none")
    if graphs not in ("none", "full"):
        reasons.append(f"cuda_graphs: {graphs!r:.60} (want 'full' or 'none': a fused layer cannot be split)")
    reasons += _speculation(deployment, features)
    reasons += _widths(deployment)
    return tuple(reasons)


def _on(features: Mapping[str, object], off: Mapping[str, tuple[object, ...]]) -> list[str]:
    return [
        f"{name}: {features[name]!r:.60} (want {values[0]!r}): is not supported"
        for name, values in off.items()
        if name in features and not any(_same(features[name], value) for value in values)
    ]


def _same(a: object, b: object) -> bool:
    return type(a) is type(b) and a == b


def _caches(deployment: Deployment, features: Mapping[str, object], config: Config | None) -> list[str]:
    reasons = []
    if deployment.kv_format != "fp8_e4m3":
        reasons.append(f"kv_format: the KV cache is {deployment.kv_format} (want fp8_e4m3)")
    index = features.get("index_cache_dtype", deployment.kv_format)
    if index != "fp8_e4m3":
        reasons.append(f"index_cache_dtype: the index cache is {index!s:.60} (want fp8_e4m3)")
    limit = deployment.max_context
    if config is not None:
        block = features.get("block_size", config.block_size)
        if not _same(block, config.block_size):
            reasons.append(f"block_size: {block!r:.40} (want {config.block_size}, the model's sparse block)")
    if limit > MOST_CONTEXT:
        reasons.append(f"max_context: {limit} is more than the {MOST_CONTEXT} tokens that block scores span")
    if config is not None and limit > config.max_positions:
        reasons.append(f"max_context: {limit} is more than the model's {config.max_positions} positions")
    if config is not None and limit % config.block_size:
        # a block table lists whole blocks, and no row may stand behind the RoPE table
        reasons.append(f"max_context: {limit} is no whole number of KV blocks of {config.block_size}")
    return reasons


def _speculation(deployment: Deployment, features: Mapping[str, object]) -> list[str]:
    reasons = []
    method = features.get("speculative_method", "dspark")
    if method != "dspark":
        reasons.append(f"speculative_method: {method!r:.60} (want 'dspark' with fixed verify, or none)")
    if deployment.verify == "confidence":
        reasons.append(
            "verify: confidence-scheduled DSpark gives each request its own number of rows (want 'fixed')"
        )
    if deployment.verify == "ragged":
        reasons.append("verify: ragged DSpark shifts the rows of later requests (want 'fixed')")
    if deployment.verify != "off" and deployment.draft_len != DRAFTS:
        reasons.append(f"draft_len: {deployment.draft_len} (want {DRAFTS}: {1 + DRAFTS} rows a request)")
    return reasons


def _widths(deployment: Deployment) -> list[str]:
    reasons = []
    other = [width for width in deployment.widths if width not in WIDTHS]
    if other:
        reasons.append(f"widths: {', '.join(map(str, other))} (want some of {', '.join(map(str, WIDTHS))})")
    missing = [width for width in ALWAYS if width not in deployment.widths]
    if missing:
        reasons.append(f"widths: {' and '.join(map(str, missing))} missing, always built")
    return reasons
