"""What every stored matrix has in common, whatever its format."""

from dataclasses import FrozenInstanceError, fields
from typing import get_args

import pytest
import torch
from torch import Tensor

from mono.formats import Bf16, Matrix, Mxfp4, Mxfp8, Nvfp4, PtpcFp8, mxfp4, mxfp8, nvfp4, ptpc_fp8

E, N, K = 3, 5, 64

QUANTISERS = {
    "bf16": lambda x: Bf16(x.bfloat16()),
    "ptpc_fp8": ptpc_fp8.quantise_weight,
    "mxfp8": mxfp8.quantise,
    "mxfp4": mxfp4.quantise,
    "nvfp4, divides": lambda x: nvfp4.quantise(x, "compressed-tensors"),
    "nvfp4, multiplies": lambda x: nvfp4.quantise(x, "modelopt"),
}


def expert_table() -> Tensor:
    return torch.randn(E, N, K, generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=QUANTISERS, name="table")
def _table(request: pytest.FixtureRequest) -> Matrix:
    return QUANTISERS[request.param](expert_table())


def test_names() -> None:
    assert {kind.format_name: kind for kind in get_args(Matrix)} == {
        "bf16": Bf16,
        "ptpc_fp8": PtpcFp8,
        "mxfp8": Mxfp8,
        "mxfp4": Mxfp4,
        "nvfp4": Nvfp4,
    }


def test_shape_is_logical(table: Matrix) -> None:
    assert isinstance(table, Matrix)
    assert table.shape == torch.Size((E, N, K))
    assert table.dequantise().shape == table.shape
    assert table.dequantise().dtype == torch.float32


def test_indexing_commutes_with_dequantising(table: Matrix) -> None:
    whole = table.dequantise()
    chosen = torch.tensor([2, 0, 2])
    for index in (1, -1, slice(0, 2), (1, slice(2, 4)), (slice(None), slice(1, 4)), (2, 3), chosen):
        part = table[index]
        assert type(part) is type(table)
        assert part.shape == whole[index].shape
        assert torch.equal(part.dequantise(), whole[index])


def test_rows_cut_n_whatever_comes_before_it(table: Matrix) -> None:
    assert torch.equal(table.rows(1, 4).dequantise(), table.dequantise()[:, 1:4])
    assert torch.equal(table[2].rows(1, 4).dequantise(), table.dequantise()[2, 1:4])


def test_a_scalar_global_scale_stays_a_scalar() -> None:
    matrix = nvfp4.quantise(expert_table()[0], "modelopt")
    assert matrix.global_scale.shape == ()
    assert torch.equal(matrix[1:3].global_scale, matrix.global_scale)
    assert torch.equal(matrix[1:3].dequantise(), matrix.dequantise()[1:3])


def test_to_moves_every_tensor(table: Matrix) -> None:
    moved = table.to("meta")
    assert type(moved) is type(table)
    assert moved.device.type == "meta"
    assert moved.shape == table.shape
    assert table.device.type == "cpu"
    assert table.to("cpu").shape == table.shape


def test_no_rows_are_a_matrix(table: Matrix) -> None:
    assert table.rows(0, 0).dequantise().shape == (E, 0, K)


def test_fields_cannot_be_exchanged(table: Matrix) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(table, fields(table)[0].name, torch.ones(1))


def test_two_devices_are_refused() -> None:
    values = torch.zeros(2, 32).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="ptpc_fp8 lies on cpu and meta, expected one device"):
        PtpcFp8(values, torch.ones(2, device="meta"))


def test_bf16_names_the_field() -> None:
    with pytest.raises(ValueError, match=r"bf16: values has dtype torch.float32, expected torch.bfloat16"):
        Bf16(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"bf16: values has shape \[\], expected at least 1 dimension"):
        Bf16(torch.tensor(1.0).bfloat16())


def test_bf16_is_itself() -> None:
    x = expert_table().bfloat16()
    assert torch.equal(Bf16(x).dequantise(), x.float())


def test_strided_input_is_quantised_as_its_copy() -> None:
    x = expert_table()
    for quantise in QUANTISERS.values():
        strided = x.transpose(0, 1)
        assert torch.equal(quantise(strided).dequantise(), quantise(strided.contiguous()).dequantise())


def test_constructors_take_strided_bytes() -> None:
    """A view of every second row, as a cut of a larger table would be."""
    whole = mxfp4.quantise(expert_table().reshape(E * N, K))
    view = Mxfp4(whole.packed[::2], whole.scale[::2])
    assert torch.equal(view.dequantise(), whole.dequantise()[::2])
