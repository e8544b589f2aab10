"""Paged caches and steps for the attention tests: permuted pages, dirty tails, every length at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mono.caches import LayerCache
from mono.fast.interpreter import interpret
from mono.step import Step

ORDERS = [None, "reverse", 1]
NOWHERE = 1 << 30  # a page that no cache has: reading it is an error, or a crash on a GPU

Test = TypeVar("Test", bound=Callable[..., None])


def with_device(test: Test) -> Test:
    """Hypothesis for a test that also takes the `device` fixture, which holds nothing to reset."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(suppress_health_check=checks)(test)


def launching(device: torch.device, order: int | str | None = None) -> contextlib.AbstractContextManager:
    """On the CPU: unset lanes are NaN, programs may not share memory, and run in `order`."""
    if device.type == "cuda":
        return contextlib.nullcontext()
    return interpret(poison=True, races=True, order=order)


def paged(
    lengths: Sequence[int],
    q_len: int = 1,
    seed: int = 0,
    block: int = 16,
    heads: int = 2,
    head_dim: int = 16,
    index_dim: int = 16,
    dead: float = float("nan"),
    k_size: float = 1.0,
    spare: int = 2,
) -> tuple[LayerCache, Step]:
    """A cache in which requests of `lengths` keys lie on permuted pages, and the step that reads them.

    Slots that hold no key hold `dead`: its scales are that, its codes the nearest e4m3 has. Block tables
    are `spare` entries longer than any request, and point nowhere past a request's last block.
    """
    rng = torch.Generator().manual_seed(seed)
    M = max(1, max(-(-length // block) for length in lengths)) + spare
    cache = LayerCache.empty(M * len(lengths) + 1, block, heads, head_dim, index_dim)
    for name in ("k", "v", "index_k"):
        values = getattr(cache, name)
        code = torch.tensor(dead).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        values.view(torch.uint8).fill_(int(code))
    cache.k_scale.fill_(dead)
    cache.v_scale.fill_(dead)
    pages = torch.randperm(cache.k.shape[0], generator=rng)[: M * len(lengths)].view(len(lengths), M)
    for table, length in zip(pages, lengths, strict=True):
        key = torch.arange(length)
        slots = table[key // block] * block + key % block
        size = 2.0 ** torch.randint(-3, 3, (length, heads, 1), generator=rng)
        k = torch.randn(length, heads, head_dim, generator=rng) * k_size
        v = torch.randn(length, heads, head_dim, generator=rng) * size
        cache.insert_kv(slots, k.bfloat16(), v.bfloat16())
        cache.insert_index_k(slots, torch.randn(length, index_dim, generator=rng).bfloat16())
        table[-(-length // block) :] = NOWHERE
    tokens = torch.zeros(len(lengths), q_len, dtype=torch.int64)
    return cache, Step.of(tokens, torch.tensor(lengths, dtype=torch.int32), pages.int(), block)


def to(cache: LayerCache, device: torch.device) -> LayerCache:
    """The same cache on another device."""
    return LayerCache(*(None if x is None else x.to(device) for x in cache._tensors()))


@st.composite
def lengths(draw: st.DrawFn, q_len: int, block: int, requests: int = 3, most: int = 6) -> list[int]:
    """Lengths of 1 to `requests` requests near block edges; 0 is a padding request."""
    edge = st.builds(lambda blocks, off: blocks * block + off, st.integers(1, most), st.integers(-2, 2))
    length = st.one_of(edge, st.integers(q_len, most * block))
    some = draw(st.lists(length.filter(lambda n: n >= q_len), min_size=1, max_size=requests))
    return some + [0] * draw(st.integers(0, 1))


def row_of(step: Step, row: int) -> Step:
    """One row as a step of its own: plain decode of its prefix."""
    request = row // step.q_len
    one = slice(row, row + 1)
    return Step(
        tokens=step.tokens[one],
        positions=step.positions[one],
        slots=step.slots[one],
        visible=step.visible[one],
        block_tables=step.block_tables[request : request + 1],
        q_len=1,
    )


def bf16_ulp(x: torch.Tensor) -> torch.Tensor:
    """Size of one step along bf16's number line at |x|."""
    exponent = torch.frexp(x.double().abs())[1] - 1
    return 2.0 ** (exponent.clamp(min=-126) - 7).double()
