"""Speculative decoding with a DSpark drafter: drafter, taps, fixed-width verify, acceptance, decode loop."""

from mono.dspark.acceptance import (
    Acceptance,
    Synthetic,
    SyntheticSchedule,
    accept_greedy,
    accept_sampled,
    decisive_rows,
    keyed_uniforms,
    processed_distribution,
    synthetic_acceptance,
)
from mono.dspark.drafter import ContextCache, Drafter, Proposal, Proposer, load_drafter
from mono.dspark.drafter_spec import DrafterSpec, DrafterWeights, LayerWeights
from mono.dspark.generate import Generated, Generator, StepRecord, empty_caches, generate
from mono.dspark.taps import Taps
from mono.dspark.verify import refuse_verify, verify_step

__all__ = [
    "Acceptance",
    "ContextCache",
    "Drafter",
    "DrafterSpec",
    "DrafterWeights",
    "Generated",
    "Generator",
    "LayerWeights",
    "Proposal",
    "Proposer",
    "StepRecord",
    "Synthetic",
    "SyntheticSchedule",
    "Taps",
    "accept_greedy",
    "accept_sampled",
    "decisive_rows",
    "empty_caches",
    "generate",
    "keyed_uniforms",
    "load_drafter",
    "processed_distribution",
    "refuse_verify",
    "synthetic_acceptance",
    "verify_step",
]
