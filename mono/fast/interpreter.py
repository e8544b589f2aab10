"""Exact interpretation of Triton kernels on CPU tensors: the object that ships, run without a GPU.

    with interpret(races=True, poison=True, order="reverse"):
        kernel[grid](cpu_tensor, ..., BLOCK=128, num_warps=4)

Triton's own interpreter truncates fp32 -> bf16, multiplies bf16 bit patterns in `tl.dot` and loses carries in fp8
casts. This one keeps its language layer and replaces what computes:

Rounding:  casts to bf16, fp16 and fp8 round to nearest even; fp8 saturates at its largest finite value; NaN stays NaN.
           bf16 and fp8 arithmetic and every `tl.dot` are exact products with fp32 sums. fp32 dots are not tf32.
Memory:    every access must fall inside a tensor argument and on a multiple of its element size.
Programs:  run one after another, in any order; sharing between them without an atomic is an error with `races=True`.
Speed:     a few tens of microseconds for each `tl` operation whatever the tile, 1-10 ns for each element.

What only a GPU or a compiler shows: speed, registers, shared memory, the order of sums inside a tile, approximate
`exp` and `/`, and code that Python accepts and Triton refuses. Float arguments are fp32, as in a launch. `libdevice`
and atomics on bf16 are not interpreted; inline assembly needs an emulation in `ASM`.

Tested with Triton 3.6 to 3.9. On another version, a private name of Triton's that has gone is named in the ImportError.
Triton is patched while a `with interpret()` block is open and put back after it; use one thread.
"""

import ast
import contextlib
import ctypes
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from triton.language.semantic import TritonSemantic
from triton.runtime import autotuner, jit
from triton.runtime import interpreter as stock

Array: TypeAlias = NDArray[Any]
Handle: TypeAlias = Any  # triton.runtime.interpreter.TensorHandle: a numpy array and a Triton type

_NEEDED = {
    stock: "InterpreterBuilder TensorHandle ReduceOps ScanOps FunctionRewriter interpreter_builder "
    "interpreter_semantic _LangPatchScope _patch_lang_core _implicit_cvt _get_np_dtype _interpreter _ir",
    stock.InterpreterBuilder: "cast_impl create_fp_to_fp binary_op unary_op create_dot create_masked_load "
    "create_masked_store create_atomic_rmw create_barrier create_inline_asm set_grid_dim create_clampf create_fma",
    TritonSemantic: "dot_scaled to_tensor",
    jit.JITFunction: "run __call__",
    autotuner.Autotuner: "run prune_configs",
}
for _owner, _names in _NEEDED.items():
    for _name in _names.split():
        if not hasattr(_owner, _name):
            raise ImportError(
                f"mono.fast.interpreter: {_owner.__name__}.{_name} is missing from Triton {triton.__version__}; "
                "tested with Triton 3.6 to 3.9"
            )

ASM: dict[str, Callable[..., Any]] = {}
"""Inline assembly text -> a numpy function of the operands that returns the result, or a tuple of results."""


class KernelMemoryError(AssertionError):
    """A kernel touched memory outside its arguments, misaligned, or shared between programs without an atomic."""


@dataclass
class _Settings:
    check: bool = True
    races: bool = False
    poison: bool = False
    order: int | str | None = None
    extra: tuple[torch.Tensor, ...] = ()


_settings: _Settings | None = None  # of the innermost open interpret(); None outside


# ------------------------------------------------------------------------------------------- number formats

_RTZ = stock._ir.ROUNDING_MODE.RTZ
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP8: dict[
    Any, tuple[torch.dtype, int, int, float, int]
] = {  # torch's type, fraction bits, bias, largest, NaN code
    tl.float8e4nv: (torch.float8_e4m3fn, 3, 7, 448.0, 0x7F),
    tl.float8e4b8: (torch.float8_e4m3fnuz, 3, 8, 240.0, 0x80),
    tl.float8e5: (torch.float8_e5m2, 2, 15, 57344.0, 0x7F),
    tl.float8e5b16: (torch.float8_e5m2fnuz, 2, 16, 57344.0, 0x80),
}
_SMALL = frozenset((tl.bfloat16, *_FP8))  # held as bit patterns, since numpy has no such types


@functools.cache
def _fp8_values(ty: Any) -> Array:
    """The 256 values of an fp8 type, in fp32."""
    return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(_FP8[ty][0]).float().numpy()


def _round_to_fp8(x: Array, ty: Any) -> Array:
    """Any float -> fp8 codes by the definition: nearest even on the type's grid, saturated, NaN kept."""
    _, fraction, bias, largest, nan_code = _FP8[ty]
    grid = _fp8_values(ty)[:128].astype(np.float64)
    grid = grid[: int(np.nonzero(grid == largest)[0][0]) + 1]
    is_nan = np.isnan(x)
    size = np.where(is_nan, 0.0, np.minimum(np.abs(x.astype(np.float64)), largest))
    exponent = np.maximum(np.frexp(size)[1] - 1, 1 - bias)
    rounded = np.ldexp(np.rint(np.ldexp(size, fraction - exponent)), exponent - fraction)
    code = np.searchsorted(grid, np.minimum(rounded, largest)).astype(np.uint8)
    negative = np.signbit(x) & ((code != 0) | (nan_code != 0x80))  # the fnuz types have no minus zero
    return np.where(is_nan, np.uint8(nan_code), code | (negative.astype(np.uint8) << np.uint8(7)))


@functools.cache
def _fp8_codes(ty: Any) -> Array:
    """fp8 code of each of the 65536 bf16 bit patterns."""
    return _round_to_fp8(_decode(np.arange(65536, dtype=np.uint16), tl.bfloat16), ty)


def _decode(x: Array, ty: Any) -> Array:
    """Bit patterns of a small float type -> fp32; any other type as it is."""
    if ty == tl.bfloat16:
        return np.left_shift(x, np.uint32(16), dtype=np.uint32).view(np.float32)
    if ty in _FP8:
        return _fp8_values(ty)[x]
    return x


def _encode(x: Array, ty: Any, toward_zero: bool = False) -> Array:
    """Numbers -> the type's bit patterns, rounded to nearest even; fp8 saturates."""
    if ty == tl.bfloat16:
        u = np.asarray(x, np.float32).view(np.uint32)
        rounded = u if toward_zero else u + (((u >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))
        out = (rounded >> np.uint32(16)).astype(np.uint16)
        is_nan = np.isnan(x)
        return np.where(is_nan, np.uint16(0x7FFF), out) if is_nan.any() else out
    if ty in _FP8:
        if x.dtype == np.float64:
            return _round_to_fp8(x, ty)
        # bf16 has at least three bits more than any fp8 type, so its last bit can stand for all below it
        u = np.asarray(x, np.float32).view(np.uint32)
        sticky = (u & np.uint32(0xFFFF)) != 0
        return _fp8_codes(ty)[(u >> np.uint32(16)) | sticky]
    return x.astype(stock._get_np_dtype(ty))


def _convert(x: Array, src: Any, dst: Any, rounding: Any = None) -> Array:
    return x if src == dst else _encode(_decode(x, src), dst, rounding is not None and rounding == _RTZ)


def _mx_operand(h: Handle, scale: Handle | None, fmt: Any, k_packed: bool, is_rhs: bool) -> Array:
    """An operand of `tl.dot_scaled` in fp32: e2m1 unpacked, E8M0 scales applied along K."""
    if fmt == stock._ir.ScaleDotElemTypeTY.E2M1:
        axis = (-2 if k_packed else -1) if is_rhs else (-1 if k_packed else -2)
        packed = np.moveaxis(h.data, axis, -1)
        value = np.stack([_E2M1[packed & 15], _E2M1[packed >> 4]], axis=-1)
        value = np.moveaxis(value.reshape(*packed.shape[:-1], -1), -1, axis)
    else:
        value = _decode(h.data, h.dtype.scalar).astype(np.float32)
    if scale is None:
        return value
    code = scale.data.view(np.uint8)
    factor = np.where(code == 255, np.nan, np.ldexp(1.0, code.astype(np.int32) - 127)).astype(np.float32)
    factor = np.repeat(factor, value.shape[-2 if is_rhs else -1] // code.shape[-1], axis=-1)
    return np.asarray(value * (np.swapaxes(factor, -1, -2) if is_rhs else factor))


# ------------------------------------------------------------------------------------------- memory


class _Memory:
    """The bytes that a launch may touch: each tensor argument from its first to its last element, merged where they
    overlap, and, with `races`, which program wrote or read each."""

    def __init__(self, tensors: Iterable[torch.Tensor], races: bool) -> None:
        spans: list[list[int]] = []
        for start, end in sorted(_extent(t) for t in tensors if t.numel()):
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(end, spans[-1][1])
            else:
                spans.append([start, end])
        self.starts = [start for start, _ in spans]
        self.start_array = np.array(self.starts, np.int64)
        self.ends = [end for _, end in spans]
        self.views: dict[tuple[int, Any], Array] = {}
        # per byte: program + 1 that wrote it, the epoch when, program + 1 that read it (-1: several)
        self.marks = [np.zeros((3, end - start), np.int32) for start, end in spans] if races else None

    def view(self, span: int, dtype: Any) -> Array:
        """The span as an array of `dtype`."""
        found = self.views.get((span, dtype))
        if found is None:
            start, size = self.starts[span], (self.ends[span] - self.starts[span]) // dtype.itemsize
            buffer = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(start)
            found = self.views[span, dtype] = np.frombuffer(buffer, dtype)
        return found

    def locate(
        self, address: Array, size: int, kind: str, program: tuple[int, int, int]
    ) -> tuple[int, Array]:
        """(span, element index within it) of int64 addresses; span -1 if they lie in several."""
        low, high = int(address.min()), int(address.max())
        span = int(self.start_array.searchsorted(low, side="right")) - 1
        if span < 0 or high + size > self.ends[span]:
            span = self._locate_each(address, size, kind, program)
        offset = address - self.starts[max(span, 0)]
        if size > 1 and (address & (size - 1)).any():
            raise KernelMemoryError(f"misaligned {kind} in program {program}: elements of {size} bytes")
        return span, offset // size if size > 1 else offset

    def _locate_each(self, address: Array, size: int, kind: str, program: tuple[int, int, int]) -> int:
        if not self.starts:
            raise KernelMemoryError(f"{kind} in program {program}: the launch has no tensor arguments")
        span = self.start_array.searchsorted(address, side="right") - 1
        bad = (span < 0) | (address + size > np.array(self.ends)[np.maximum(span, 0)])
        if bad.any():
            near, where = max(int(span[bad][0]), 0), int(address[bad][0])
            raise KernelMemoryError(
                f"{kind} out of bounds in program {program}: {int(bad.sum())} of {address.size} lanes; byte "
                f"{where - self.starts[near]} of a tensor of {self.ends[near] - self.starts[near]} bytes"
            )
        return -1

    def mark(self, address: Array, is_store: bool, builder: "_Builder") -> None:
        """Record an access and raise on a race. `builder` says which program and epoch it is."""
        assert self.marks is not None
        me, released = builder.program + 1, builder.acquired
        spans = self.start_array.searchsorted(address, side="right") - 1
        for span in np.unique(spans):
            offset = address[spans == span] - self.starts[span]
            wrote, when, read = self.marks[span]
            writer, reader = wrote[offset], read[offset]
            others = writer[(writer != 0) & (writer != me)]
            if is_store:
                if others.size and not released:
                    raise KernelMemoryError(
                        f"race: programs {others[0] - 1} and {me - 1} store to the same address"
                    )
                if ((reader != 0) & (reader != me)).any() and not released:
                    raise KernelMemoryError(f"race: program {me - 1} overwrites what another program reads")
                wrote[offset], when[offset] = me, builder.epoch
            else:
                if others.size and not released:
                    raise KernelMemoryError(
                        f"race: program {me - 1} reads what program {others[0] - 1} stores"
                    )
                if ((writer == me) & (when[offset] == builder.epoch)).any():
                    raise KernelMemoryError(
                        f"race: program {me - 1} reads back its own store with no tl.debug_barrier() in between"
                    )
                read[offset] = np.where((reader == 0) | (reader == me), me, -1)


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """First and one past the last address of a tensor's elements."""
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def _poison(ty: Any, dtype: Any) -> Any:
    """What a lane holds that was loaded neither from memory nor from `other`."""
    if ty in _SMALL:
        return _encode(np.array([np.nan], np.float32), ty)[0]
    if dtype.kind == "f":
        return np.nan
    return True if dtype.kind == "b" else 0x55


# ------------------------------------------------------------------------------------------- operations


class _Builder(stock.InterpreterBuilder):  # type: ignore[misc]  # Triton ships no types
    """Triton's numpy backend with the operations replaced that it gets wrong, or slowly right."""

    def __init__(self) -> None:
        super().__init__()
        # the overflow checks of integer arithmetic end in a device_assert that never fires, at ten operations each
        self.options = replace(self.options, sanitize_overflow=False)
        self.memory: _Memory | None = None
        self.program = 0  # position of the running program in the grid
        self.epoch = 0  # grows at each barrier, so that a program may read back what it stored before one
        self.acquired = False  # the program has synchronised with others by an atomic

    # casts and arithmetic

    def cast_impl(self, src: Handle, dst_type: Any) -> Handle:
        return stock.TensorHandle(_convert(src.data, src.dtype.scalar, dst_type.scalar), dst_type.scalar)

    def create_fp_to_fp(self, src: Handle, dst_type: Any, rounding: Any) -> Handle:
        return stock.TensorHandle(
            _convert(src.data, src.dtype.scalar, dst_type.scalar, rounding), dst_type.scalar
        )

    def get_fp8e4b8_ty(self) -> Any:
        return tl.float8e4b8

    def get_bf16(self, value: float) -> Handle:
        return stock.TensorHandle(_encode(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)

    def get_fp8e4nv(self, value: float) -> Handle:
        return stock.TensorHandle(_encode(np.array([value], np.float32), tl.float8e4nv), tl.float8e4nv)

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., Array]) -> Handle:
        ty = lhs.dtype.scalar
        if ty not in _SMALL:
            return super().binary_op(lhs, rhs, op)
        out = op(_decode(lhs.data, ty), _decode(rhs.data, rhs.dtype.scalar))
        return (
            stock.TensorHandle(out, tl.int1)
            if out.dtype == np.bool_
            else stock.TensorHandle(_encode(out, ty), ty)
        )

    def unary_op(self, arg: Handle, op: Callable[..., Array]) -> Handle:
        ty = arg.dtype.scalar
        if ty not in _SMALL:
            return super().unary_op(arg, op)
        return stock.TensorHandle(_encode(op(_decode(arg.data, ty)), ty), ty)

    def create_maxnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_clampf(self, arg: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
        keep = propagate_nan == stock._ir.PROPAGATE_NAN.ALL
        lower, upper = (np.maximum, np.minimum) if keep else (np.fmax, np.fmin)
        return self.binary_op(self.binary_op(arg, low, lower), high, upper)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        ty = z.dtype.scalar
        a, b, c = (_decode(h.data, ty).astype(np.float64) for h in (x, y, z))  # the product is exact
        return stock.TensorHandle(
            _encode((a * b + c).astype(np.float32) if ty in _SMALL else a * b + c, ty), ty
        )

    def create_dot(
        self, a: Handle, b: Handle, acc: Handle, input_precision: Any, max_num_imprecise: Any
    ) -> Handle:
        ta, tb = a.dtype.scalar, b.dtype.scalar
        if not ta.is_floating() or acc.data.dtype != np.float32:
            return super().create_dot(a, b, acc, input_precision, max_num_imprecise)
        left, right = (np.asarray(_decode(h.data, t), np.float32) for h, t in ((a, ta), (b, tb)))
        return stock.TensorHandle(np.matmul(left, right) + acc.data, acc.dtype.scalar)

    def create_dot_scaled(
        self,
        a: Handle,
        a_scale: Handle | None,
        a_format: Any,
        b: Handle,
        b_scale: Handle | None,
        b_format: Any,
        fast_math: bool,
        a_k_packed: bool,
        b_k_packed: bool,
        acc: Handle,
    ) -> Handle:
        left = _mx_operand(a, a_scale, a_format, a_k_packed, is_rhs=False)
        right = _mx_operand(b, b_scale, b_format, b_k_packed, is_rhs=True)
        return stock.TensorHandle(np.matmul(left, right) + acc.data, tl.float32)

    def create_inline_asm(
        self, asm: str, constraints: str, values: Sequence[Handle], out_types: Any, is_pure: bool, pack: int
    ) -> Any:
        if asm not in ASM:
            raise NotImplementedError(f"no emulation in mono.fast.interpreter.ASM of inline assembly {asm!r}")
        out = ASM[asm](*(value.data for value in values))
        out = out if isinstance(out, tuple) else (out,)
        handles = [
            stock.TensorHandle(np.asarray(o).astype(stock._get_np_dtype(t)), t.scalar)
            for o, t in zip(out, out_types, strict=True)
        ]
        return types.SimpleNamespace(get_result=handles.__getitem__)

    # memory

    def create_load(self, ptr: Handle, *rest: Any) -> Handle:
        return self._load(ptr, None, None)

    def create_masked_load(
        self, ptrs: Handle, mask: Handle, other: Handle | None, *rest: Any, **kw: Any
    ) -> Handle:
        return self._load(ptrs, _mask_array(mask), other)

    def create_store(self, ptr: Handle, value: Handle, *rest: Any) -> None:
        self._store(ptr, value, None)

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Handle, *rest: Any, **kw: Any) -> None:
        self._store(ptrs, value, _mask_array(mask))

    def _load(self, ptrs: Handle, mask: Array | None, other: Handle | None) -> Handle:
        ty = ptrs.get_element_ty()
        dtype = stock._get_np_dtype(ty)
        address = ptrs.data.view(np.int64)
        on = None if mask is None or mask.all() else np.broadcast_to(mask, address.shape)
        if on is None and self.memory is not None:
            return stock.TensorHandle(self._read(address, dtype), ty)
        if other is not None:
            out = np.array(np.broadcast_to(other.data, address.shape), dtype)
        else:
            poison = _settings is not None and _settings.poison
            out = np.full(address.shape, _poison(ty, dtype) if poison else 0, dtype)
        if self.memory is None:
            mask = np.ones(address.shape, bool) if on is None else on
            return stock.TensorHandle(stock._interpreter.load(ptrs.data, mask, out, dtype), ty)
        if on is not None and on.any():
            out[on] = self._read(address[on], dtype)
        return stock.TensorHandle(out, ty)

    def _read(self, address: Array, dtype: Any) -> Array:
        assert self.memory is not None
        span, index = self.memory.locate(address, dtype.itemsize, "load", self.grid_idx)
        if self.memory.marks is not None:
            self.memory.mark(address, is_store=False, builder=self)
        if span < 0:
            on, zero = np.ones(address.shape, bool), np.zeros(address.shape, dtype)
            return np.asarray(stock._interpreter.load(address.view(np.uint64), on, zero, dtype))
        return self.memory.view(span, dtype)[index]

    def _store(self, ptrs: Handle, value: Handle, mask: Array | None) -> None:
        address, data = ptrs.data.view(np.int64), value.data
        if mask is not None and not mask.all():
            on = np.broadcast_to(mask, address.shape)
            if not on.any():
                return
            address, data = address[on], np.broadcast_to(data, address.shape)[on]
        dtype = stock._get_np_dtype(ptrs.get_element_ty())
        if self.memory is None:
            span, index = -1, address
        else:
            span, index = self.memory.locate(address, dtype.itemsize, "store", self.grid_idx)
            if self.memory.marks is not None:
                self.memory.mark(address, is_store=True, builder=self)
        if span < 0 or self.memory is None:
            on = np.ones(address.shape, bool)
            data = np.broadcast_to(data, address.shape).astype(dtype, copy=False)
            stock._interpreter.store(address.view(np.uint64), data, on)
        else:
            self.memory.view(span, dtype)[index] = data

    def create_atomic_rmw(
        self, op: Any, ptr: Handle, value: Handle, mask: Handle, sem: Any, scope: Any
    ) -> Handle:
        on = np.broadcast_to(_mask_array(mask), ptr.data.shape)
        if self.memory is not None and on.any():
            size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
            self.memory.locate(ptr.data.view(np.int64)[on], size, "atomic", self.grid_idx)
        if sem in (stock._ir.MEM_SEMANTIC.ACQUIRE, stock._ir.MEM_SEMANTIC.ACQUIRE_RELEASE):
            self.acquired, self.epoch = (
                True,
                self.epoch + 1,
            )  # the last program to arrive may read what others stored
        return super().create_atomic_rmw(op, ptr, value, mask, sem, scope)

    def create_barrier(self, *args: Any, **kw: Any) -> None:
        self.epoch += 1


def _mask_array(mask: Any) -> Array:
    return np.asarray(mask if isinstance(mask, np.ndarray) else mask.data)


class _Semantic(TritonSemantic):  # type: ignore[misc]  # Triton ships no types
    """Triton's type rules over `_Builder`."""

    def dot_scaled(self, lhs: Any, ls: Any, lf: Any, rhs: Any, rs: Any, rf: Any, *rest: Any) -> Any:
        # before 3.8 the rules read `.value`, which interpretation has already unwrapped
        if _TRITON < (3, 8):
            lf, rf = (f if isinstance(f, tl.constexpr) else tl.constexpr(f) for f in (lf, rf))
        return super().dot_scaled(lhs, ls, lf, rhs, rs, rf, *rest)


_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
_builder = _Builder()
_semantic = _Semantic(_builder)


# ------------------------------------------------------------------------------------------- reductions


def _wrap(data: Array, ty: Any) -> Any:
    """A numpy array as a Triton tensor."""
    data = np.asarray(data)
    if data.shape:
        return tl.core.tensor(stock.TensorHandle(data, ty), tl.block_type(ty, list(data.shape)))
    return tl.core.tensor(stock.TensorHandle(data.reshape(1), ty), ty)


_FAST_REDUCE = {  # combine function of tl.standard -> numpy reduction; NaN never wins, as on hardware
    "_sum_combine": np.add,
    "_elementwise_max": np.fmax,
    "_elementwise_min": np.fmin,
}
_ARG_REDUCE = {
    "_argmax_combine_tie_break_left": (np.max, np.argmax),
    "_argmax_combine_tie_break_fast": (np.max, np.argmax),
    "_argmin_combine_tie_break_left": (np.min, np.argmin),
    "_argmin_combine_tie_break_fast": (np.min, np.argmin),
}


def _is_standard(combine: Any) -> bool:
    return bool(getattr(combine, "fn", combine).__module__ == "triton.language.standard")


def _reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **kw: Any) -> Any:
    """`tl.reduce`: numpy for Triton's own sums and extrema, a tree of whole-tile combines for any other."""
    inputs = input if isinstance(input, tuple) else (input,)
    axis, keep_dims = getattr(axis, "value", axis), bool(getattr(keep_dims, "value", keep_dims))
    tys = [x.dtype for x in inputs]
    data = [_decode(x.handle.data, ty) for x, ty in zip(inputs, tys, strict=True)]
    rank = len(inputs[0].shape)
    if axis is None:
        data, axis = [d.reshape(-1) for d in data], 0
    elif not -rank <= axis < rank:
        raise ValueError(f"reduce: axis {axis} of a tensor of {rank} dimensions")
    name = getattr(combine_fn, "__name__", "") if _is_standard(combine_fn) else ""
    if name in _FAST_REDUCE and len(data) == 1:
        out = [_FAST_REDUCE[name].reduce(data[0], axis=axis)]
    elif name in _ARG_REDUCE and len(data) == 2:
        value, where = _ARG_REDUCE[name]
        index = np.expand_dims(where(data[0], axis=axis), axis)
        out = [value(data[0], axis=axis), np.take_along_axis(data[1], index, axis).squeeze(axis)]
    else:
        out = _combine_tree(data, [tl.float32 if ty in _SMALL else ty for ty in tys], axis, combine_fn)
    if keep_dims:
        dims = tuple(range(rank)) if data[0].ndim != rank else axis
        out = [np.expand_dims(o, dims) for o in out]
    result = tuple(_wrap(_encode(np.asarray(o), ty), ty) for o, ty in zip(out, tys, strict=True))
    return result if isinstance(input, tuple) else result[0]


def _combine_tree(data: list[Array], tys: list[Any], axis: int, combine_fn: Any) -> list[Array]:
    """Combine neighbours along `axis` until one is left, so an associative function sees its operands in order."""
    parts = [np.moveaxis(d, axis, 0) for d in data]
    while (count := len(parts[0])) > 1:
        left = [_wrap(p[0 : count - 1 : 2], ty) for p, ty in zip(parts, tys, strict=True)]
        right = [_wrap(p[1::2], ty) for p, ty in zip(parts, tys, strict=True)]
        combined = _combine(combine_fn, left, right)
        odd = [p[count - count % 2 :] for p in parts]
        parts = [np.concatenate([c, o]) if len(o) else c for c, o in zip(combined, odd, strict=True)]
    return [p[0] for p in parts]


def _combine(combine_fn: Any, left: list[Any], right: list[Any]) -> list[Array]:
    out = combine_fn(*left, *right)
    shape = left[0].handle.data.shape
    return [np.broadcast_to(o.handle.data, shape) for o in (out if isinstance(out, tuple) else (out,))]


def _scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **kw: Any) -> Any:
    """`tl.associative_scan`: numpy for Triton's own sums and products, one combine a step for any other."""
    inputs = input if isinstance(input, tuple) else (input,)
    axis, reverse = getattr(axis, "value", axis), bool(getattr(reverse, "value", reverse))
    tys = [x.dtype for x in inputs]
    wide = [tl.float32 if ty in _SMALL else ty for ty in tys]
    parts = [np.moveaxis(_decode(x.handle.data, ty), axis, 0) for x, ty in zip(inputs, tys, strict=True)]
    if reverse:
        parts = [p[::-1] for p in parts]
    name = getattr(combine_fn, "__name__", "") if _is_standard(combine_fn) else ""
    if name in ("_sum_combine", "_prod_combine") and len(parts) == 1:
        ufunc = np.add if name == "_sum_combine" else np.multiply
        out = [ufunc.accumulate(parts[0], axis=0, dtype=parts[0].dtype)]
    else:
        rows = [[p[0:1] for p in parts]]
        for i in range(1, len(parts[0])):
            here = [_wrap(p[i : i + 1], ty) for p, ty in zip(parts, wide, strict=True)]
            before = [_wrap(p, ty) for p, ty in zip(rows[-1], wide, strict=True)]
            rows.append(_combine(combine_fn, before, here))
        out = [np.concatenate(column) for column in zip(*rows, strict=True)]
    if reverse:
        out = [o[::-1] for o in out]
    result = tuple(_wrap(np.moveaxis(_encode(o, ty), 0, axis), ty) for o, ty in zip(out, tys, strict=True))
    return result if isinstance(input, tuple) else result[0]


# ------------------------------------------------------------------------------------------- the language


def _as_builtin(member: Any) -> Callable[..., Any]:
    """A `tl` builtin bound to the interpreter's semantics."""
    inner = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kw: Any) -> Any:
        kw["_semantic"] = _semantic
        return inner(*args, **kw)

    return call


@functools.cache
def _language() -> list[tuple[Any, str, Any, Any]]:
    """(object, attribute, interpreted, original) of everything in `triton.language` that a kernel body calls."""
    scope = stock._LangPatchScope()
    changes: dict[tuple[int, str], tuple[Any, str, Any, Any]] = {}

    def put(owner: Any, name: str, new: Any) -> None:
        old = owner.__dict__.get(name, stock._MISSING) if isinstance(owner, type) else getattr(owner, name)
        changes[id(owner), name] = (owner, name, new, old)

    for owner in (tl, tl.core, tl.math, tl.core.tensor, tl.core.tensor_descriptor_base):
        for name, member in inspect.getmembers(owner):
            if tl.core.is_builtin(member):
                put(owner, name, _as_builtin(member))
    patched: list[tuple[Any, str, Any]] = []
    scope.set_attr = lambda owner, name, new: patched.append((owner, name, new))
    for lang in (tl, tl.core):
        stock._patch_lang_core(lang, scope)
        patched += [(lang, "reduce", _reduce), (lang, "associative_scan", _scan)]
    stock._patch_lang_tensor(tl.core.tensor, scope)
    for owner, name, new in patched:
        put(owner, name, new)
    put(tl.core.tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))
    for name in ("gdc_wait", "gdc_launch_dependents"):  # programs run one after another: nothing to wait for
        if hasattr(tl.extra.cuda, name):
            put(tl.extra.cuda, name, lambda **kw: None)
    return list(changes.values())


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    for owner, name, new, _ in _language():
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, _, old in _language():
            if old is stock._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


class _Rewriter(stock.FunctionRewriter):  # type: ignore[misc]  # Triton ships no types
    """Turns assigned Python numbers into Triton scalars; leaves the kernel's module as it is."""

    def _compile_and_exec(self, tree: ast.Module) -> Any:
        # the function becomes a closure over the interpreter's names and its own free variables
        given = {name: getattr(stock, name) for name in ("_InterpreterComparison",) if hasattr(stock, name)}
        given["interpreter_semantic"] = _semantic
        given.update(inspect.getclosurevars(self.fn).nonlocals)
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef)
        factory = ast.parse(f"def factory({', '.join(given)}):\n    return {function.name}")
        outer = factory.body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.body.insert(0, function)
        namespace: dict[str, Any] = {}
        exec(compile(factory, self.filename, "exec"), self.fn.__globals__, namespace)
        return namespace["factory"](**given)


@functools.cache
def _rewritten(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _Rewriter(fn).rewrite_ast()  # type: ignore[no-any-return]  # Triton ships no types


# ------------------------------------------------------------------------------------------- launching

_depth = 0  # 1 while a kernel is being interpreted


@functools.cache
def _parameters(fn: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any], frozenset[str]]:
    """Names of the parameters, their defaults, and which of them are constexpr."""
    parameters = inspect.signature(fn).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    annotation = {n: p.annotation for n, p in parameters.items()}
    constexprs = frozenset(n for n, a in annotation.items() if a is tl.constexpr or "constexpr" in str(a))
    return tuple(parameters), defaults, constexprs


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "base"):  # a tensor descriptor, or a tensor reinterpreted as another type
        yield from _tensors(value.base)


@functools.cache
def _pointer_type(dtype: torch.dtype) -> Any:
    return stock._implicit_cvt(torch.empty(0, dtype=dtype)).dtype


def _argument(value: Any) -> Any:
    """A launch argument as a kernel sees it."""
    if type(value) is torch.Tensor:
        ty = _pointer_type(value.dtype)
        return tl.core.tensor(stock.TensorHandle(np.array([value.data_ptr()], np.uint64), ty), ty)
    if isinstance(value, bool):
        return _wrap(np.array(value), tl.int1)
    if isinstance(value, float):
        return _wrap(np.array(value, np.float32), tl.float32)
    if isinstance(value, tuple):
        items = [_argument(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return stock._implicit_cvt(value)


def _launch(kernel: Any, args: tuple[Any, ...], kw: dict[str, Any], grid: Any) -> None:
    global _depth
    assert _settings is not None
    names, defaults, constexprs = _parameters(kernel.fn)
    if len(args) > len(names):
        raise TypeError(f"{kernel.__name__}: {len(args)} positional arguments for {len(names)} parameters")
    bound = {
        **defaults,
        **dict(zip(names, args, strict=False)),
        **{n: v for n, v in kw.items() if n in names},
    }
    if missing := [n for n in names if n not in bound]:
        raise TypeError(f"{kernel.__name__}: no value for {', '.join(missing)}")
    tensors = list(_tensors(tuple(bound.values())))
    for t in tensors:
        if t.device.type != "cpu":
            raise ValueError(f"{kernel.__name__}: interpretation takes CPU tensors, one is on {t.device}")
    for hook in kernel.pre_run_hooks:
        hook(*args, **kw)
    shape = grid(bound) if callable(grid) else grid
    nx, ny, nz = (int(n) for n in (*(shape if isinstance(shape, (tuple, list)) else (shape,)), 1, 1)[:3])
    body = _rewritten(kernel.fn)
    if _settings.check:
        _builder.memory = _Memory([*tensors, *_settings.extra], _settings.races)
    _builder.set_grid_dim(nx, ny, nz)
    _depth += 1
    try:
        with _interpreted_language(), np.errstate(all="ignore"):
            values = {n: bound[n] if n in constexprs else _argument(bound[n]) for n in names}
            for i in _program_order(nx * ny * nz, _settings.order):
                _builder.grid_idx = (i // (ny * nz), i // nz % ny, i % nz)
                _builder.program, _builder.acquired = i, False
                _builder.epoch += 1
                body(**values)
    finally:
        _depth -= 1
        _builder.memory = None


def _program_order(count: int, order: int | str | None) -> Iterable[int]:
    if order is None:
        return range(count)
    if order == "reverse":
        return range(count - 1, -1, -1)
    if isinstance(order, str):
        raise ValueError(f'interpret: order is None, "reverse" or a shuffle seed, not {order!r}')
    return map(int, np.random.default_rng(order).permutation(count))


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.run`: a launch is interpreted, a warmup is compiled as always."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kw: Any) -> Any:
        if warmup:
            return original(self, *args, grid=grid, warmup=warmup, **kw)
        return _launch(self, args, kw, grid)

    return run


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.__call__`: a device function called by an interpreted kernel."""

    def call(self: Any, *args: Any, **kw: Any) -> Any:
        return _rewritten(self.fn)(*args, **kw) if _depth else original(self, *args, **kw)

    return call


def _tune(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Autotuner.run`: the first config that pruning keeps, since there is nothing to time."""

    def run(self: Any, *args: Any, **kw: Any) -> Any:
        configs = self.configs
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            self.configs = self.prune_configs(kw)[:1]
            return original(self, *args, **kw)
        finally:
            self.configs = configs

    return run


@contextlib.contextmanager
def interpret(
    check: bool = True,
    races: bool = False,
    poison: bool = False,
    order: int | str | None = None,
    extra: Iterable[torch.Tensor] = (),
) -> Iterator[None]:
    """Interpret every kernel launched inside the block; launches take CPU tensors.

    check:   raise `KernelMemoryError` on an access outside the tensor arguments and `extra`, or misaligned.
    races:   also raise when programs share memory without an atomic, or one reads back its own store without a barrier.
    poison:  lanes that a mask switches off and that name no `other` hold NaN (floats) or 0x55 (integers).
    order:   of the programs: None is ascending, "reverse", or a seed to shuffle by.
    extra:   tensors that kernels reach through addresses stored in memory.

    Blocks nest: the innermost settings hold. Warmups inside a block compile as usual.
    """
    global _settings
    outer, _settings = _settings, _Settings(check or races, races, poison, order, tuple(extra))
    try:
        if outer is not None:
            yield
        else:
            with _patched_triton():
                yield
    finally:
        _settings = outer


@contextlib.contextmanager
def _patched_triton() -> Iterator[None]:
    changes: list[tuple[Any, str, Any]] = [
        (jit.JITFunction, "run", _run(jit.JITFunction.run)),
        (jit.JITFunction, "__call__", _call(jit.JITFunction.__call__)),
        (autotuner.Autotuner, "run", _tune(autotuner.Autotuner.run)),
        (stock, "interpreter_builder", _builder),
        (stock, "interpreter_semantic", _semantic),
    ]
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, new in changes:
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, value in old:
            setattr(owner, name, value)


def launch_context(tensor_device: torch.device) -> contextlib.AbstractContextManager[None]:
    """How a fast arm launches on this device: interpreted on the CPU, as usual elsewhere.

    Free inside another `interpret()`, whose settings it keeps. A host function wraps its launches in it, and so runs on
    CPU tensors exactly as its kernels are written.
    """
    if tensor_device.type != "cpu" or _settings is not None:
        return contextlib.nullcontext()
    return interpret()
