"""Taps: the residual stream after a layer, whole, the last layer's included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dspark_toys import SWIGLU, generator, prompts, tiny_target

from mono.assembly import Assembly
from mono.caches import LayerCache
from mono.decode import run
from mono.deployment import Deployment
from mono.dspark import Taps, empty_caches, verify_step
from mono.interface import Carry
from mono.layers import dense_attention, dense_mlp, embed, head
from mono.parallel import SOLO
from mono.plan import Plan, Slot
from mono.reference.ops.rms_norm import absorb
from mono.step import Step

SIZE = 4


def adding_target(layers: int = 6) -> Assembly:
    """Layer i adds i + 1 to a residual stream that starts at 0; half a layer is not a tap."""

    def add(amount: float) -> object:
        def layer(carry: Carry, step: Step, cache: LayerCache) -> Carry:
            total = absorb(carry, SOLO)
            return replace(
                carry,
                residual=total.bfloat16(),
                partial=torch.full_like(carry.residual, amount),
                logits=torch.zeros(step.rows, SIZE),
                top1=torch.zeros(step.rows, dtype=torch.int64),
            )

        return layer

    slots = [Slot(-1, "embed", embed.Spec(SIZE, SIZE, SIZE))]
    built = [add(0.0)]
    for i in range(layers):
        slots.append(Slot(i, "dense_attention", dense_attention.Spec(SIZE, 1, 1, SIZE, SIZE, 1e-6, 16)))
        slots.append(Slot(i, "dense_mlp", dense_mlp.Spec(SIZE, SIZE, 1e-6, **SWIGLU)))
        built += [add(0.25), add(i + 0.75)]
    slots.append(Slot(layers, "head", head.Spec(SIZE, SIZE, SIZE, 1e-6)))
    built.append(add(99.0))
    sides = ("reference",) * len(built)
    return Assembly(Plan(tuple(slots)), tuple(built), sides, torch.device("cpu"), Deployment())  # type: ignore[arg-type]


def test_taps_are_the_stream_after_layers_1_3_and_5_at_every_verify_row() -> None:
    target = adding_target()
    step = verify_step(
        torch.tensor([1, 2]), torch.zeros(2, 7, dtype=torch.int64), torch.tensor([5, 9]),
        torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), 16,
    )  # fmt: skip
    output = run(target, step, empty_caches(target.plan, 4), (1, 3, 5))
    taps = Taps.empty((1, 3, 5), 6, SIZE, rows=16)
    assert taps.hold(output.taps).shape == (16, 3 * SIZE)
    # one layer early would be 1, 6, 15; the branch without the residual 2, 4, 6
    for layer, stream in ((1, 3.0), (3, 10.0), (5, 21.0)):
        assert torch.equal(taps.tap(layer), torch.full((16, SIZE), stream, dtype=torch.bfloat16))


def test_the_embedding_and_the_last_layer_are_taps_of_a_real_model() -> None:
    """Tap -1 is the embedding's row; the last one is what the head normalises."""
    target = tiny_target()
    g = generator(target)
    ids = prompts(9)[0]
    table = torch.arange(g.table_width, dtype=torch.int32)[None]
    step = Step.of(torch.tensor([ids]), torch.tensor([9], dtype=torch.int32), table, g.block_size)
    output = run(target, step, g.caches, (-1, 3))
    carry = target.start(step)
    for index in range(len(target.plan.slots)):
        carry = target.run_slot(index, carry, step, g.caches)
        if index == 0:
            assert carry.partial is not None
            assert torch.equal(output.taps[:, :64], carry.partial)
    assert torch.equal(output.taps[:, 64:], carry.residual)


def test_the_buffer_outlives_the_step_and_keeps_its_address() -> None:
    taps = Taps.empty((0, 2), 3, SIZE, rows=8)
    address = taps.buffer.data_ptr()
    stream = torch.ones(3, 2 * SIZE, dtype=torch.bfloat16)
    held = taps.hold(stream)
    stream.zero_()  # a step's own buffers are reused
    assert held.data_ptr() == address
    assert (held == 1).all()
    assert taps.buffer[3:].isnan().all()


@pytest.mark.parametrize(
    ("ids", "buffer", "expected"),
    [
        ((3, 1), torch.zeros(8, 8), "strictly increasing"),
        ((1, 1), torch.zeros(8, 8), "strictly increasing"),
        ((1, 6), torch.zeros(8, 8), "from -1 to 5"),
        ((), torch.zeros(8, 0), "at least one id"),
        ((1, 3), torch.zeros(8, 8, dtype=torch.float32), "expected bfloat16, got torch.float32"),
        ((1, 3), torch.zeros(8, 12), r"\[rows, 2 x 4 = 8\], got \[8, 12\]"),
        ((1, 3), torch.zeros(64), r"got \[64\]"),
        ((1, 3), torch.zeros(8, 8).T, "contiguous"),
    ],
)
def test_binding_checks_the_buffer(ids: tuple[int, ...], buffer: torch.Tensor, expected: str) -> None:
    if "float32" not in expected:
        buffer = buffer.bfloat16()
        buffer = buffer if expected != "contiguous" else torch.zeros(8, 8, dtype=torch.bfloat16).T
    with pytest.raises(ValueError, match=expected):
        Taps(ids, 6, SIZE, buffer)


def test_holding_checks_the_step() -> None:
    taps = Taps.empty((1, 3), 6, SIZE, rows=8)
    with pytest.raises(ValueError, match="at most 8 rows, got 9"):
        taps.hold(torch.zeros(9, 8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"got torch.float32 \[4, 8\]"):
        taps.hold(torch.zeros(4, 8))
    with pytest.raises(ValueError, match="no tap after layer 2"):
        taps.tap(2)
