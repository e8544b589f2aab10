"""May this step run fused, and at which width? Decided from plain host facts, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mono.deployment import Deployment
from mono.refusal import Declined
from mono.step import Step

WIDTHS = (1, 2, 4, 8, 16, 32)
ALWAYS = (8, 16)  # one and two requests with their 7 drafts


@dataclass(frozen=True, slots=True)
class Fused:
    """This step runs fused, padded to `width` rows. Truthy."""

    width: int


class TensorMeta(NamedTuple):
    """What is known of a tensor without reading it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> TensorMeta:
        """Of a tensor on any device; nothing is read from it."""
        return TensorMeta(tensor.dtype, tuple(tensor.shape), tensor.stride())


@dataclass(frozen=True, slots=True)
class StepMeta:
    """The facts of one step that decide. All of them must be equal on every tensor-parallel rank.

    rows:           T, padding rows counted. q_len: rows per request.
    positions:      at least T. slots: at least T cache slots. lengths: keys, one per request at least.
    block_tables:   pages, one row per request at least.
    prefill:        any row is a prefill's. micro_batch: the step is a part of a split batch.
    embeddings, intermediates:  inputs come as embeddings, or from an earlier pipeline stage.
    capturing:      the step is being recorded into a graph.
    """

    rows: int
    q_len: int
    positions: TensorMeta
    slots: TensorMeta
    lengths: TensorMeta
    block_tables: TensorMeta
    prefill: bool = False
    micro_batch: bool = False
    embeddings: bool = False
    intermediates: bool = False
    capturing: bool = False

    @staticmethod
    def of(step: Step) -> StepMeta:
        """Of a decode or verify step of this library."""
        return StepMeta(
            rows=step.rows,
            q_len=step.q_len,
            positions=TensorMeta.of(step.positions),
            slots=TensorMeta.of(step.slots),
            lengths=TensorMeta.of(step.visible),
            block_tables=TensorMeta.of(step.block_tables),
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What was bound: widths, ascending; rows per request; KV blocks that a block table may list."""

    widths: tuple[int, ...]
    q_len: int
    most_blocks: int

    @staticmethod
    def of(deployment: Deployment, block_size: int) -> Limits:
        """A deployment's, for KV blocks of `block_size` tokens."""
        return Limits(deployment.widths, deployment.q_len, deployment.max_context // block_size)


def eligible(meta: StepMeta, limits: Limits) -> Fused | Declined:
    """The width this step runs at, the smallest that holds its rows, or the first reason against it.

    Pure: no device is read, nothing is kept. A rank-local fact must not be added, or the ranks part ways
    and wait for each other for ever.
    """
    n, q = meta.rows, meta.q_len
    if meta.prefill:
        return Declined("the step has prefill rows")
    if meta.micro_batch:
        return Declined("the step is a micro-batch")
    if meta.embeddings:
        return Declined("input embeddings are given")
    if meta.intermediates:
        return Declined("intermediate tensors are given")
    if meta.capturing:
        return Declined("the step is being captured into a graph, and no width is prepared for that")
    if q != limits.q_len:
        return Declined(f"{q} rows a request, bound for {limits.q_len}")
    if n < 1 or n > limits.widths[-1]:
        return Declined(f"{n} rows, bound for 1 to {limits.widths[-1]}")
    if n % q:
        return Declined(f"{n} rows are not whole requests of {q}")
    requests = n // q
    for name, tensor, dtype, least in (
        ("positions", meta.positions, torch.int64, n),
        ("slots", meta.slots, torch.int64, n),
        ("lengths", meta.lengths, torch.int32, requests),
    ):
        if tensor.dtype != dtype:
            return Declined(f"{name}: expected {dtype}, got {tensor.dtype}")
        if len(tensor.shape) != 1 or tensor.shape[0] < least:
            return Declined(f"{name}: expected [{least}] or more, got {list(tensor.shape)}")
    tables = meta.block_tables
    if tables.dtype != torch.int32:
        return Declined(f"block_tables: expected torch.int32, got {tables.dtype}")
    if len(tables.shape) != 2 or tables.shape[0] < requests:
        return Declined(f"block_tables: expected [{requests}, M] or more rows, got {list(tables.shape)}")
    if tables.strides != (tables.shape[1], 1):
        return Declined(
            f"block_tables: expected rows {tables.shape[1]} apart, got strides {list(tables.strides)}"
        )
    if tables.shape[1] > limits.most_blocks:
        return Declined(f"block_tables: {tables.shape[1]} KV blocks, bound for {limits.most_blocks}")
    for width in limits.widths:
        if width >= n and width % q == 0:
            return Fused(width)
    return Declined(f"no width of {list(limits.widths)} holds whole requests of {q}")
