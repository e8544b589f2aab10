"""SwiGLU-OAI of the reference, against worked values."""

import pytest
import torch

from mono.reference.ops.swiglu import swiglu_oai


# worked by hand from g sigmoid(1.702 g) (u + 1) with the clamps
@pytest.mark.parametrize(
    ("gate", "up", "want"),
    [
        (1.0, 1.0, 1.691592),
        (10.0, 10.0, 55.999625),
        (2.0, -9.0, -11.613952),
        (7.0, -7.0, -41.999719),
        (-10.0, 3.0, -1.62318e-6),
        (0.0, 5.0, 0.0),
    ],
)
def test_worked_values(gate: float, up: float, want: float) -> None:
    got = swiglu_oai(torch.tensor([[gate, up]]), 1.702, 1.0, 7.0).item()
    assert got == pytest.approx(want, rel=1e-3 if abs(want) < 1e-3 else 1e-6)


def test_gate_is_clamped_above_only() -> None:
    low = swiglu_oai(torch.tensor([[-20.0, 1.0]]), 1.702, 1.0, 7.0)
    at_minus_7 = swiglu_oai(torch.tensor([[-7.0, 1.0]]), 1.702, 1.0, 7.0)
    assert low.abs() < at_minus_7.abs() / 1000


def test_halves_are_split_not_interleaved() -> None:
    # gate (1, 2), up (10, 20) with silu-like parameters: g sigmoid(g) u
    got = swiglu_oai(torch.tensor([[1.0, 2.0, 10.0, 20.0]]), 1.0, 0.0, 100.0)
    assert got.tolist()[0] == pytest.approx([7.310586, 35.231883], rel=1e-6)
