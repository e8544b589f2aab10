"""Triton's builder and type rules over numpy: what each `tl` operation computes."""

import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as stock

from mono.fast.interpreting.formats import E2M1, SMALL, Array, convert, decode, encode, np_dtype
from mono.fast.interpreting.memory import Memory

ASM: dict[str, Callable[..., Any]] = {}
"""Inline assembly text -> a numpy function of the operands that returns the result, or a tuple of results."""

_IR = stock._ir
_TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


class Handle(stock.TensorHandle):  # type: ignore[misc]  # Triton ships no types
    """A numpy array and the scalar Triton type that it stands for."""

    def __init__(self, data: Array, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data = data
        self.dtype = dtype
        self.attr = {} if attr is None else attr


def as_tensor(data: Array, ty: Any) -> Any:
    """A numpy array as a Triton tensor of scalar type `ty`; a single number becomes a scalar."""
    if data.shape:
        return tl.core.tensor(Handle(data, ty), tl.core.block_type(ty, list(data.shape)))
    return tl.core.tensor(Handle(data.reshape(1), ty), ty)


def _mx_operand(h: Handle, scale: Handle | None, fmt: Any, k_packed: bool, is_rhs: bool) -> Array:
    """An operand of `tl.dot_scaled` in fp32: e2m1 unpacked, E8M0 scales applied along K."""
    if fmt == _IR.ScaleDotElemTypeTY.E2M1:
        axis = (-2 if k_packed else -1) if is_rhs else (-1 if k_packed else -2)
        packed = np.moveaxis(h.data, axis, -1)
        value = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], axis=-1)
        value = np.moveaxis(value.reshape(*packed.shape[:-1], -1), -1, axis)
    else:
        value = decode(h.data, h.dtype.scalar).astype(np.float32)
    if scale is None:
        return value
    code = scale.data.view(np.uint8)
    factor = np.where(code == 255, np.nan, np.ldexp(1.0, code.astype(np.int32) - 127)).astype(np.float32)
    factor = np.repeat(factor, value.shape[-2 if is_rhs else -1] // code.shape[-1], axis=-1)
    return np.asarray(value * (np.swapaxes(factor, -1, -2) if is_rhs else factor))


def _poison(ty: Any, dtype: np.dtype[Any]) -> Any:
    """What a lane holds that comes neither from memory nor from `other`."""
    if ty.name in SMALL:
        return encode(np.array([np.nan], np.float32), ty)[0]
    if dtype.kind == "f":
        return np.nan
    return True if dtype.kind == "b" else 0x55


class Builder(stock.InterpreterBuilder):  # type: ignore[misc]  # Triton ships no types
    """Triton's numpy backend with the operations replaced that it gets wrong, or right but slowly."""

    def __init__(self) -> None:
        super().__init__()
        # the overflow checks of integer arithmetic end in an assert that never fires, at ten operations each
        self.options: Any = replace(stock.InterpreterOptions(), sanitize_overflow=False)
        self.memory: Memory | None = None  # of the running launch
        self.poison = False

    # casts and arithmetic

    def cast_impl(self, src: Handle, dst_type: Any) -> Handle:
        return Handle(convert(src.data, src.dtype.scalar, dst_type.scalar), dst_type.scalar)

    def create_fp_to_fp(self, src: Handle, dst_type: Any, rounding: Any) -> Handle:
        toward_zero = rounding is not None and rounding == _IR.ROUNDING_MODE.RTZ
        return Handle(convert(src.data, src.dtype.scalar, dst_type.scalar, toward_zero), dst_type.scalar)

    def get_bf16(self, value: float) -> Handle:
        return Handle(encode(np.array([value], np.float32), tl.bfloat16), tl.bfloat16)

    def get_fp8e4nv(self, value: float) -> Handle:
        return Handle(encode(np.array([value], np.float32), tl.float8e4nv), tl.float8e4nv)

    def binary_op(self, lhs: Handle, rhs: Handle, op: Callable[..., Array]) -> Handle:
        ty = lhs.dtype.scalar
        if ty.name in SMALL:
            out = op(decode(lhs.data, ty), decode(rhs.data, rhs.dtype.scalar))
            return Handle(out, tl.int1) if out.dtype == np.bool_ else Handle(encode(out, ty), ty)
        out = op(lhs.data, rhs.data)
        if out.dtype == np.bool_:
            return Handle(out, tl.int1)
        dtype = np_dtype(ty)
        return Handle(out.astype(dtype) if out.itemsize > dtype.itemsize else out, ty)

    def unary_op(self, arg: Handle, op: Callable[..., Array]) -> Handle:
        ty = arg.dtype.scalar
        return Handle(encode(op(decode(arg.data, ty)), ty) if ty.name in SMALL else op(arg.data), ty)

    def create_maxnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_minnumf(self, lhs: Handle, rhs: Handle) -> Handle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_clampf(self, arg: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
        keep = propagate_nan == _IR.PROPAGATE_NAN.ALL
        lower, upper = (np.maximum, np.minimum) if keep else (np.fmax, np.fmin)
        return self.binary_op(self.binary_op(arg, low, lower), high, upper)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        ty = z.dtype.scalar
        a, b, c = (decode(h.data, ty).astype(np.float64) for h in (x, y, z))  # an exact product, then one sum
        out = a * b + c
        return Handle(encode(out.astype(np.float32) if ty.name in SMALL else out, ty), ty)

    def create_dot(self, a: Handle, b: Handle, acc: Handle, *precision: Any) -> Handle:
        ty = acc.dtype.scalar
        wide = np.float32 if ty.is_fp16() else acc.data.dtype
        left, right = (decode(h.data, h.dtype.scalar).astype(wide, copy=False) for h in (a, b))
        return Handle((np.matmul(left, right) + acc.data).astype(acc.data.dtype, copy=False), ty)

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
        return Handle(np.matmul(left, right) + acc.data, tl.float32)

    def create_inline_asm(
        self, asm: str, constraints: str, values: Sequence[Handle], out_types: Any, is_pure: bool, pack: int
    ) -> Any:
        if asm not in ASM:
            raise NotImplementedError(f"no emulation in mono.fast.interpreter.ASM of inline assembly {asm!r}")
        out = ASM[asm](*np.broadcast_arrays(*(value.data for value in values)))
        out = out if isinstance(out, tuple) else (out,)
        handles = [
            Handle(np.asarray(o).astype(np_dtype(t)), t.scalar) for o, t in zip(out, out_types, strict=True)
        ]
        return types.SimpleNamespace(get_result=handles.__getitem__)

    # memory

    def create_addptr(self, ptr: Handle, offset: Handle) -> Handle:
        size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)  # int1 takes a byte
        by = offset.data.view(np.int64) if offset.data.dtype == np.uint64 else offset.data
        address, by = ptr.data.view(np.int64), np.multiply(by, size, dtype=np.int64)
        if (address.size == 1 and address.ndim <= by.ndim) or address.shape == by.shape:
            # in place: the arrays can be large
            by += address if address.size > 1 else address.item()
            return Handle(by.view(np.uint64), ptr.dtype)
        return Handle((address + by).view(np.uint64), ptr.dtype)

    def create_load(self, ptr: Handle, *rest: Any) -> Handle:
        return self._load(ptr, None, None)

    def create_masked_load(
        self, ptrs: Handle, mask: Any, other: Handle | None, *rest: Any, **kw: Any
    ) -> Handle:
        return self._load(ptrs, mask, other)

    def create_store(self, ptr: Handle, value: Handle, *rest: Any) -> None:
        self._store(ptr, value, None)

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Any, *rest: Any, **kw: Any) -> None:
        self._store(ptrs, value, mask)

    def _load(self, ptrs: Handle, mask: Any, other: Handle | None) -> Handle:
        ty = ptrs.get_element_ty()
        dtype = np_dtype(ty)
        address = ptrs.data.view(np.int64)
        on = _partial(mask, address.shape)
        if on is None:
            return Handle(self._read(address, dtype), ty)
        if other is not None:
            out = np.empty(address.shape, dtype)
            out[...] = other.data
        else:
            out = np.full(address.shape, _poison(ty, dtype) if self.poison else 0, dtype)
        out[on] = self._read(address[on], dtype)
        return Handle(out, ty)

    def _read(self, address: Array, dtype: np.dtype[Any]) -> Array:
        if not address.size:
            return np.empty(address.shape, dtype)
        span = -1
        if self.memory is not None:
            span, index = self.memory.locate(address, dtype.itemsize, "load")
            if span >= 0:
                return self.memory.view(span, dtype)[index]
        on, zero = np.ones(address.shape, bool), np.zeros(address.shape, dtype)
        return np.asarray(stock._interpreter.load(address.view(np.uint64), on, zero, dtype))

    def _store(self, ptrs: Handle, value: Handle, mask: Any) -> None:
        dtype = np_dtype(ptrs.get_element_ty())
        address, written = ptrs.data.view(np.int64), value.data
        on = _partial(mask, address.shape)
        if on is not None:
            address, written = address[on], np.broadcast_to(written, address.shape)[on]
            if not address.size:
                return
        if self.memory is not None:
            span, index = self.memory.locate(address, dtype.itemsize, "store")
            if span >= 0:
                self.memory.view(span, dtype)[index] = written
                return
        written = np.broadcast_to(written, address.shape).astype(dtype, copy=False)
        stock._interpreter.store(address.view(np.uint64), written, np.ones(address.shape, bool))

    def create_atomic_rmw(self, op: Any, ptr: Handle, value: Handle, mask: Any, sem: Any, scope: Any) -> Any:
        if self.memory is not None:
            on = _partial(mask, ptr.data.shape)
            address = ptr.data.view(np.int64)
            address = address if on is None else address[on]
            if address.size:
                self.memory.locate(address, np_dtype(ptr.get_element_ty()).itemsize, "atomic")
            if sem in (_IR.MEM_SEMANTIC.ACQUIRE, _IR.MEM_SEMANTIC.ACQUIRE_RELEASE):
                self.memory.acquired = True  # the last program to arrive may read what the others stored
                self.memory.epoch += 1
        return super().create_atomic_rmw(op, ptr, value, mask, sem, scope)

    def create_barrier(self, *args: Any, **kw: Any) -> None:
        if self.memory is not None:
            self.memory.epoch += 1


def _partial(mask: Any, shape: tuple[int, ...]) -> Array | None:
    """A mask in the shape of the addresses, or None if every lane is on."""
    if mask is None:
        return None
    lanes = np.asarray(mask if isinstance(mask, np.ndarray) else mask.data)
    if lanes.all():
        return None
    return lanes if lanes.shape == shape else np.broadcast_to(lanes, shape)


_ARITHMETIC = frozenset(("fp32", "int32", "int64"))
_CONVERTIBLE = SMALL | {"fp16", "fp32", "fp64"} | {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)}


class Semantic(TritonSemantic):  # type: ignore[misc]  # Triton ships no types
    """Triton's type rules, with short cuts where they have nothing to decide."""

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        src, dst = input.type.scalar, dst_ty.scalar
        if src.name == dst.name:
            return input
        if fp_downcast_rounding is None and dst.name in _CONVERTIBLE and src.name in _CONVERTIBLE:
            handle = Handle(convert(input.handle.data, src, dst), dst)
            return tl.core.tensor(handle, input.type.with_element_ty(dst) if input.type.is_block() else dst)
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def binary_op_type_checking_impl(
        self, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, *args: Any, **kw: Any
    ) -> Any:
        same = _same_type(lhs, rhs, allow_lhs_ptr)
        return (
            super().binary_op_type_checking_impl(lhs, rhs, allow_lhs_ptr, *args, **kw)
            if same is None
            else same
        )

    def load(self, ptr: Any, mask: Any, other: Any, *rest: Any) -> Any:
        loaded = super().load(ptr, mask, other, *rest)
        if other is None or loaded.handle.data.size > 1:
            return loaded
        # the rules ask `if other`, which is false of a single zero
        return self.where(mask, loaded, self.cast(other, loaded.dtype))

    def dot_scaled(self, lhs: Any, ls: Any, lf: Any, rhs: Any, rs: Any, rf: Any, *rest: Any) -> Any:
        # before 3.8 the rules read `.value`, which interpretation has already unwrapped
        if _TRITON < (3, 8):
            lf, rf = (f if isinstance(f, tl.constexpr) else tl.constexpr(f) for f in (lf, rf))
        return super().dot_scaled(lhs, ls, lf, rhs, rs, rf, *rest)


def _same_type(lhs: Any, rhs: Any, allow_lhs_ptr: bool) -> tuple[Any, Any] | None:
    """Operands of one type as they are, retyped to the common shape; None where Triton's rules must decide.

    The arrays keep their own shapes: every caller hands both to one elementwise numpy operation, which
    broadcasts them.
    """
    tensor = tl.core.tensor
    if not isinstance(lhs, tensor):
        swapped = _same_type(rhs, lhs, False) if isinstance(rhs, tensor) else None
        return None if swapped is None else (swapped[1], swapped[0])
    ty = lhs.type.scalar
    name = ty.name
    if not isinstance(rhs, tensor):
        kind = type(rhs)
        if name == "fp32" and (kind is float or kind is int):
            return lhs, tensor(Handle(np.array([rhs], np.float32), ty), lhs.type)
        if kind is int and (name == "int32" or name == "int64") and -(2**31) <= rhs < 2**31:
            return lhs, tensor(Handle(np.array([rhs], np_dtype(ty)), ty), lhs.type)
        return None
    other = rhs.type.scalar
    alike = name in _ARITHMETIC and other.name == name
    offset = allow_lhs_ptr and ty.is_ptr() and other.name in ("int32", "int64")
    if not alike and not offset:
        return None
    left, right = lhs.type, rhs.type
    if not right.is_block():
        return lhs, rhs if right is left else tensor(
            rhs.handle, left.with_element_ty(other) if left.is_block() else other
        )
    if not left.is_block():
        return tensor(lhs.handle, right.with_element_ty(ty)), rhs
    if left.shape is right.shape:
        return lhs, rhs
    try:
        shape = np.broadcast_shapes(tuple(left.shape), tuple(right.shape))
    except ValueError:
        return None
    return tensor(lhs.handle, tl.core.block_type(ty, shape)), tensor(
        rhs.handle, tl.core.block_type(other, shape)
    )


BUILDER = Builder()
SEMANTIC = Semantic(BUILDER)
