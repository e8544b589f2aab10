"""The winning token: reference against a loop, fast arm against reference, bit for bit."""

import math

import pytest
import torch
from compiled_launches import compiled_launches, meta
from hypothesis import given
from hypothesis import strategies as st
from strict import ORDERS, on_devices, strict
from torch import Tensor

from mono.fast.ops import top1 as fast
from mono.reference.ops import top1 as reference

SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.inf,
    -math.inf,
    math.nan,
    -math.nan,
    2.0**-149,
    -(2.0**-149),
    3.4e38,
    -3.4e38,
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Few distinct values, so many ties; special ones; padded columns that would win if they could."""
    rows, vocab = draw(st.sampled_from([1, 3, 8, 17, 32])), draw(st.integers(1, 90))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = torch.Generator().manual_seed(seed)
    values = torch.tensor(draw(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=4)))
    logits = values[torch.randint(len(values), (rows, vocab), generator=rng)]
    padding = torch.full((rows, draw(st.integers(0, 9))), draw(st.sampled_from([math.inf, math.nan])))
    return torch.cat([logits, padding], 1), vocab


def by_hand(row: list[float]) -> int:
    """First NaN, else first of the largest."""
    best = 0
    for i, x in enumerate(row):
        if math.isnan(x):
            return i
        if x > row[best]:
            best = i
    return best


@given(cases())
def test_reference_is_the_rule(case: tuple[Tensor, int]) -> None:
    logits, vocab = case
    assert reference.top1(logits, vocab).tolist() == [by_hand(row[:vocab]) for row in logits.tolist()]


@on_devices
@pytest.mark.parametrize("order", ORDERS)
@given(cases())
def test_fast_is_the_reference(device: str, order: int | str | None, case: tuple[Tensor, int]) -> None:
    logits, vocab = case
    with strict(device, order):
        got = fast.top1(logits.to(device), vocab)
    assert got.dtype == torch.int64
    assert torch.equal(got.cpu(), reference.top1(logits, vocab))


@on_devices
def test_tiles_of_a_large_vocabulary_agree(device: str) -> None:
    """Winners at both ends, in every tile, and the same value in two tiles."""
    logits = torch.randn(8, 5000)
    places = [0, 4998, 1023, 1024, 2048, 4096, 4999, 777]
    for row, place in enumerate(places):
        logits[row, place] = 9.0
    logits[7, 4500] = 9.0
    with strict(device):
        got = fast.top1(logits.to(device), 4999)
    places[6] = int(logits[6, :4999].argmax())  # column 4999 is padding
    assert got.tolist() == places


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="expected fp32"):
        fast.top1(torch.zeros(2, 4).bfloat16(), 4)
    with pytest.raises(ValueError, match="V at least 5"):
        fast.top1(torch.zeros(2, 4), 5)


def test_compiles_at_the_real_vocabulary(compile_target) -> None:
    made = compiled_launches(compile_target, lambda: fast.top1(meta(16, 200064, dtype=torch.float32), 200064))
    assert {name: c.spills for name, c in made.items()} == {"_tile_top1_kernel": 0, "_best_tile_kernel": 0}
