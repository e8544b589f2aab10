"""`tl.reduce` and `tl.associative_scan`, tile by tile instead of element by element."""

from typing import Any

import numpy as np
import triton.language as tl

from mono.fast.interpreting.formats import SMALL, Array, decode, encode
from mono.fast.interpreting.operations import as_tensor

_REDUCE = {  # combine function of tl.standard -> numpy's; NaN never wins, as on hardware
    "_sum_combine": np.add,
    "_elementwise_max": np.fmax,
    "_elementwise_min": np.fmin,
}
_ARG_REDUCE = {  # of ties the leftmost, also where the hardware leaves it open
    "_argmax_combine_tie_break_left": (np.max, np.argmax),
    "_argmax_combine_tie_break_fast": (np.max, np.argmax),
    "_argmin_combine_tie_break_left": (np.min, np.argmin),
    "_argmin_combine_tie_break_fast": (np.min, np.argmin),
}
_SCAN = {"_sum_combine": np.add, "_prod_combine": np.multiply}


def _standard_name(combine_fn: Any) -> str:
    """The name of one of Triton's own combine functions; empty for any other function."""
    fn = getattr(combine_fn, "fn", combine_fn)
    return str(fn.__name__) if fn.__module__ == "triton.language.standard" else ""


def _wide(ty: Any) -> Any:
    return tl.float32 if ty.name in SMALL else ty


def _results(out: list[Array], tys: list[Any], input: Any) -> Any:
    wrapped = tuple(as_tensor(encode(np.asarray(o), ty), ty) for o, ty in zip(out, tys, strict=True))
    return wrapped if isinstance(input, (tuple, tl.core.tuple)) else wrapped[0]


def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **kw: Any) -> Any:
    """`tl.reduce`: numpy for Triton's own sums and extrema, a tree of whole-tile combines for the rest."""
    inputs = tuple(input) if isinstance(input, (tuple, tl.core.tuple)) else (input,)
    axis, keep_dims = getattr(axis, "value", axis), bool(getattr(keep_dims, "value", keep_dims))
    tys = [x.dtype for x in inputs]
    data = [decode(x.handle.data, ty) for x, ty in zip(inputs, tys, strict=True)]
    rank = len(inputs[0].shape)
    dims: Any = axis
    if axis is None:
        data, axis, dims = [d.reshape(-1) for d in data], 0, tuple(range(rank))
    elif not -rank <= axis < rank:
        raise ValueError(f"reduce: axis {axis} of a tensor of {rank} dimensions")
    name = _standard_name(combine_fn)
    if name in _REDUCE and len(data) == 1:
        out = [_REDUCE[name].reduce(data[0], axis=axis)]
    elif name in _ARG_REDUCE and len(data) == 2:
        value, where = _ARG_REDUCE[name]
        index = np.expand_dims(where(data[0], axis=axis), axis)
        out = [value(data[0], axis=axis), np.take_along_axis(data[1], index, axis).squeeze(axis)]
    else:
        out = _combine_tree(data, [_wide(ty) for ty in tys], axis, combine_fn)
    return _results([np.expand_dims(o, dims) for o in out] if keep_dims else out, tys, input)


def _combine_tree(data: list[Array], tys: list[Any], axis: int, combine_fn: Any) -> list[Array]:
    """Combine neighbours along `axis` until one is left, so that operands keep their order."""
    parts = [np.moveaxis(d, axis, 0) for d in data]
    while len(parts[0]) > 1:  # a power of two, as every Triton dimension
        left = [as_tensor(p[0::2], ty) for p, ty in zip(parts, tys, strict=True)]
        right = [as_tensor(p[1::2], ty) for p, ty in zip(parts, tys, strict=True)]
        parts = _combine(combine_fn, left, right)
    return [p[0] for p in parts]


def _combine(combine_fn: Any, left: list[Any], right: list[Any]) -> list[Array]:
    out = combine_fn(*left, *right)
    shape = left[0].handle.data.shape
    return [
        np.broadcast_to(o.handle.data, shape)
        for o in (out if isinstance(out, (tuple, tl.core.tuple)) else (out,))
    ]


def associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **kw: Any) -> Any:
    """`tl.associative_scan`: numpy for Triton's own sums and products, one combine a step for the rest."""
    inputs = tuple(input) if isinstance(input, (tuple, tl.core.tuple)) else (input,)
    axis, reverse = getattr(axis, "value", axis), bool(getattr(reverse, "value", reverse))
    tys = [x.dtype for x in inputs]
    parts = [np.moveaxis(decode(x.handle.data, ty), axis, 0) for x, ty in zip(inputs, tys, strict=True)]
    if reverse:
        parts = [p[::-1] for p in parts]
    name = _standard_name(combine_fn)
    if name in _SCAN and len(parts) == 1:
        out = [_SCAN[name].accumulate(parts[0], axis=0, dtype=parts[0].dtype)]
    else:
        rows = [[p[0:1] for p in parts]]
        for i in range(1, len(parts[0])):
            before = [as_tensor(p, _wide(ty)) for p, ty in zip(rows[-1], tys, strict=True)]
            here = [as_tensor(p[i : i + 1], _wide(ty)) for p, ty in zip(parts, tys, strict=True)]
            rows.append(_combine(combine_fn, before, here))
        out = [np.concatenate(column) for column in zip(*rows, strict=True)]
    if reverse:
        out = [o[::-1] for o in out]
    return _results([np.moveaxis(o, 0, axis) for o in out], tys, input)
