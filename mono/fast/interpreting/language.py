"""`triton.language` while a kernel is interpreted: builtins bound to numpy, types built once."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from mono.fast.interpreting import reductions
from mono.fast.interpreting.operations import SEMANTIC

_tensor = tl.core.tensor
_block_type = tl.core.block_type
_original_block_init = _block_type.__init__
_MISSING = object()

_blocks: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}
_shapes: dict[
    tuple[int, ...], tuple[Any, Any, Any]
] = {}  # dimensions -> a block's shape, a tensor's shape and numel
_SCALAR = (tl.core.tuple(()), tl.constexpr(1))


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """`block_type.__init__`, computed once for each type: every operation makes one."""
    dims = tuple(shape)
    key = (id(element_ty), dims)
    try:
        found = _blocks.get(key)
    except TypeError:
        found = None
    if found is None:
        dims = tuple(int(d.value) if isinstance(d, tl.constexpr) else d for d in dims)
        _original_block_init(self, element_ty, list(dims))
        if dims not in _shapes:
            sizes = tl.core.tuple([tl.constexpr(d) for d in dims])
            _shapes[dims] = (self.shape, sizes, tl.constexpr(int(np.prod(dims))))
        self.shape, self.tensor_shape, self.tensor_numel = _shapes[dims]
        found = _blocks[id(element_ty), dims] = self.__dict__  # keeps element_ty alive, and so its id its own
    self.__dict__ = found


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """`tensor.__init__` with the shape taken from the type."""
    here = self.__dict__
    here["handle"], here["type"], here["dtype"] = handle, type, type.scalar
    if type.is_block():
        if "tensor_shape" not in type.__dict__:  # made before the kernel ran
            type = _block_type(type.element_ty, type.shape)
        here["shape"], here["numel"] = type.tensor_shape, type.tensor_numel
    else:
        here["shape"], here["numel"] = _SCALAR


def _bound(member: Any) -> Callable[..., Any]:
    """A `tl` builtin with the interpreter's type rules."""
    inner = getattr(member, "__wrapped__", member)

    def call(*args: Any, **kw: Any) -> Any:
        kw["_semantic"] = SEMANTIC
        return inner(*args, **kw)

    return call


@functools.cache
def _changes() -> list[tuple[Any, str, Any, Any]]:
    """(owner, attribute, interpreted, original) of all in `triton.language` that a kernel uses."""
    new: list[tuple[Any, str, Any]] = []
    for owner in (tl, tl.core, tl.math, _tensor, tl.core.tensor_descriptor_base):
        members = inspect.getmembers(owner)
        new += [(owner, name, _bound(member)) for name, member in members if tl.core.is_builtin(member)]

    scope = stock._LangPatchScope()  # Triton's own list of the rest, noted down instead of applied
    scope.set_attr = lambda owner, name, value: new.append((owner, name, value))
    for lang in (tl, tl.core):
        stock._patch_lang_core(lang, scope)
        new.append((lang, "reduce", reductions.reduce))
        new.append((lang, "associative_scan", reductions.associative_scan))
    stock._patch_lang_tensor(_tensor, scope)
    new.append((tl.core.dtype, "to_ir", lambda self, builder: self))  # the interpreter's types are Triton's
    new.append((_tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0])))
    new.append((_tensor, "__init__", _init_tensor))
    new.append((_block_type, "__init__", _init_block_type))
    for name in ("gdc_wait", "gdc_launch_dependents"):  # programs run one after another: nothing to wait for
        if hasattr(tl.extra.cuda, name):
            new.append((tl.extra.cuda, name, lambda **kw: None))

    last = {(id(owner), name): (owner, name, value) for owner, name, value in new}
    return [
        (
            owner,
            name,
            value,
            vars(owner).get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name),
        )
        for owner, name, value in last.values()
    ]


@contextlib.contextmanager
def interpreted_language() -> Iterator[None]:
    """Inside, `tl` computes on numpy arrays; it cannot compile."""
    for owner, name, new, _ in _changes():
        setattr(owner, name, new)
    try:
        yield
    finally:
        for owner, name, _, old in _changes():
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)
