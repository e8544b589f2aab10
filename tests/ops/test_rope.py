"""RoPE of the reference, against its definition in float64."""

import numpy as np
import pytest
import torch

from mono.reference.ops.rope import rope, rope_table

POSITIONS = [0, 1, 257, 4095, 4096, 65535, 65536, 131071, 243000]


def test_the_table_is_the_rounded_exact_value() -> None:
    table = rope_table(243001, 64, 5e6)
    p = np.array(POSITIONS, dtype=np.float64)
    angle = p[:, None] * 5e6 ** (-2.0 * np.arange(32) / 64)
    assert torch.equal(table[POSITIONS, :32], torch.from_numpy(np.cos(angle)).float())
    assert torch.equal(table[POSITIONS, 32:], torch.from_numpy(np.sin(angle)).float())


def test_pairs_are_half_a_rotation_apart_and_the_rest_passes() -> None:
    torch.manual_seed(0)
    x = torch.randn(len(POSITIONS), 3, 128)
    y = rope(x, rope_table(243001, 64, 5e6), torch.tensor(POSITIONS))
    z = x[..., :32].double().numpy() + 1j * x[..., 32:64].double().numpy()
    angle = np.array(POSITIONS)[:, None] * 5e6 ** (-2.0 * np.arange(32) / 64)
    turned = z * np.exp(1j * angle)[:, None, :]
    got = y.double().numpy()
    # two fp32 products and a sum of values below |z|: 4 roundings of 2^-24
    bound = 4 * 2.0**-24 * np.abs(z) * np.sqrt(2)
    assert (np.abs(got[..., :32] - turned.real) <= bound).all()
    assert (np.abs(got[..., 32:64] - turned.imag) <= bound).all()
    assert torch.equal(y[..., 64:], x[..., 64:])


@pytest.mark.parametrize("position", POSITIONS[2:])
def test_a_position_off_by_one_is_far_away(position: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 128)
    table = rope_table(243002, 64, 5e6)
    here, there = (rope(x, table, torch.tensor([p])) for p in (position, position + 1))
    assert (here - there).norm() / here.norm() > 0.1
