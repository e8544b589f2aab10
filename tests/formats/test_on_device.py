"""Where the bytes lie must not matter: the same bits on a GPU, and no look at an activation from the host."""

import math

import pytest
import torch
from torch import Tensor

from mono.formats import e2m1, e4m3, e8m0, kv_fp8, mxfp4, mxfp8, nvfp4, ptpc_fp8

ACTIVATION_QUANTISERS = {
    "quantise_rows": ptpc_fp8.quantise_rows,
    "quantise_heads": kv_fp8.quantise_heads,
    "encode_index_key": kv_fp8.encode_index_key,
    "mxfp8": lambda x: (mxfp8.quantise(x).values, mxfp8.quantise(x).scale),
    "mxfp8 values": lambda x: mxfp8.quantise(x).dequantise(),
}

WEIGHT_QUANTISERS = {
    "ptpc_fp8": ptpc_fp8.quantise_weight,
    "mxfp8": mxfp8.quantise,
    "mxfp4": mxfp4.quantise,
    "nvfp4, divides": lambda x: nvfp4.quantise(x, "compressed-tensors"),
    "nvfp4, multiplies": lambda x: nvfp4.quantise(x, "modelopt"),
}


def bits(x: Tensor) -> Tensor:
    """As integers on the CPU, so that -0, NaN and subnormals are compared too."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.contiguous().view(width).cpu()


def weights() -> Tensor:
    """Rows from the subnormals of bf16 to far beyond e4m3, and a row of zeros."""
    rng = torch.Generator().manual_seed(6)
    size = torch.exp2(torch.linspace(-130, 100, 24).unsqueeze(-1))
    x = torch.randn(24, 96, generator=rng) * size
    x[3] = 0.0
    return x


@pytest.mark.parametrize("name", ACTIVATION_QUANTISERS)
def test_activation_quantisers_never_look_at_a_value(name: str) -> None:
    """A meta tensor has no values: any look from the host raises, and so would capture in a CUDA graph."""
    ACTIVATION_QUANTISERS[name](torch.empty(3, 64, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("name", ["ptpc_fp8", "mxfp4", "nvfp4, divides"])
def test_weight_quantisers_do_look(name: str) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        WEIGHT_QUANTISERS[name](torch.empty(3, 64, dtype=torch.bfloat16, device="meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnGpu:
    """Bit equality of CPU and GPU: every operation here is exact or correctly rounded."""

    def test_element_codes(self) -> None:
        codes = torch.arange(256, dtype=torch.uint8)
        for decode in (e8m0.decode, lambda c: e4m3.decode(c.view(torch.float8_e4m3fn))):
            cpu, gpu = decode(codes), decode(codes.cuda())
            assert torch.equal(cpu.isnan(), gpu.isnan().cpu())
            assert torch.equal(bits(cpu)[~cpu.isnan()], bits(gpu)[~cpu.isnan()])
        assert torch.equal(bits(e2m1.decode(codes[:16])), bits(e2m1.decode(codes[:16].cuda())))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_encode(self, dtype: torch.dtype) -> None:
        """All of bf16, or as many fp32 values spread over the same range; NaN only has to stay one."""
        x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).to(dtype)
        x = torch.where(x.isnan(), 0.0, x)
        if dtype == torch.float32:
            x = x * (1 + 2.0**-9)
        assert torch.equal(bits(e4m3.encode(x)), bits(e4m3.encode(x.cuda())))
        assert torch.equal(bits(e2m1.encode(x)), bits(e2m1.encode(x.cuda())))
        assert e4m3.decode(e4m3.encode(torch.tensor([math.nan]).cuda())).isnan().all()

    @pytest.mark.parametrize("name", WEIGHT_QUANTISERS)
    def test_weights(self, name: str) -> None:
        cpu, gpu = WEIGHT_QUANTISERS[name](weights()), WEIGHT_QUANTISERS[name](weights().cuda())
        assert torch.equal(bits(cpu.scale), bits(gpu.scale))
        assert torch.equal(bits(cpu.dequantise()), bits(gpu.dequantise()))
        assert torch.equal(bits(cpu.to("cuda").dequantise()), bits(cpu.dequantise()))

    @pytest.mark.parametrize("name", ["quantise_rows", "quantise_heads", "mxfp8"])
    def test_activations(self, name: str) -> None:
        cpu, gpu = ACTIVATION_QUANTISERS[name](weights()), ACTIVATION_QUANTISERS[name](weights().cuda())
        for one, other in zip(cpu, gpu, strict=True):
            assert torch.equal(bits(one), bits(other))
