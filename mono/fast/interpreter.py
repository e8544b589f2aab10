"""Exact interpretation of Triton kernels on CPU tensors: the object that ships, run without a GPU.

    with interpret(races=True, poison=True, order="reverse"):
        kernel[grid](cpu_tensor, ..., BLOCK=128, num_warps=4)

Triton's own interpreter truncates fp32 -> bf16, multiplies bf16 bit patterns in `tl.dot` and loses carries in
fp8 casts. This one keeps its language layer and replaces what computes:

Rounding:  casts to bf16, fp16 and fp8 round to nearest even; fp8 saturates at its largest finite value; NaN
           stays NaN. bf16 and fp8 arithmetic rounds each exact result; `tl.dot` sums exact products in fp32.
Memory:    every access must fall inside a tensor argument, on a multiple of its element size.
Programs:  run one after another in any order; with `races`, sharing memory without an atomic is an error.
Arguments: a float is fp32, as in a launch.
Speed:     some 10-20 us for each `tl` operation whatever the tile, and 1-10 ns for each element.

Only a compiler or a GPU shows the rest: whether Triton accepts the code, registers and shared memory, the
order of sums inside a tile, approximate `exp` and `/`, tf32 in fp32 dots. Not interpreted: `libdevice`, bf16
atomics, and inline assembly that has no emulation in `ASM`.

Triton is patched while an `interpret()` block is open and put back after it, so a process can both interpret
and compile; open it in one thread at a time. Tested with Triton 3.6.0 to 3.9.0; on a version that lacks a
private name used here, the import fails and says which.
"""

import ast
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import autotuner, jit
from triton.runtime import interpreter as stock

_NEEDED = {
    stock: "InterpreterBuilder InterpreterOptions TensorHandle FunctionRewriter _interpreter _ir "
    "interpreter_builder interpreter_semantic _LangPatchScope _patch_lang_core _patch_lang_tensor "
    "_implicit_cvt _get_np_dtype",
    stock.InterpreterBuilder: "cast_impl create_fp_to_fp binary_op unary_op create_dot create_load "
    "create_store create_masked_load create_masked_store create_atomic_rmw create_barrier create_inline_asm "
    "create_addptr create_clampf create_maxnumf create_minnumf create_fma set_grid_dim",
    TritonSemantic: "cast binary_op_type_checking_impl dot_scaled load to_tensor where",
    tl.core: "tensor block_type tuple is_builtin tensor_descriptor_base",
    jit.JITFunction: "run __call__",
    autotuner.Autotuner: "run prune_configs",
}
for _owner, _names in _NEEDED.items():
    for _name in _names.split():
        if not hasattr(_owner, _name):
            raise ImportError(
                f"mono.fast.interpreter: Triton {triton.__version__} has no {_owner.__name__}.{_name}; "
                "tested with Triton 3.6.0 to 3.9.0"
            )

from mono.fast.interpreting.formats import np_dtype  # noqa: E402  # after the check, whose message is clearer
from mono.fast.interpreting.language import interpreted_language  # noqa: E402
from mono.fast.interpreting.memory import KernelMemoryError, Memory  # noqa: E402
from mono.fast.interpreting.operations import ASM, BUILDER, SEMANTIC, Handle, as_tensor  # noqa: E402

__all__ = ["ASM", "KernelMemoryError", "interpret", "launch_context"]


@dataclass(frozen=True)
class _Settings:
    check: bool
    races: bool
    poison: bool
    order: int | str | None
    extra: tuple[torch.Tensor, ...]


_settings: _Settings | None = None  # of the innermost open interpret(); None outside
_running = False  # a kernel is being interpreted


class _Rewriter(stock.FunctionRewriter):  # type: ignore[misc]  # Triton ships no types
    """Turns the numbers that a kernel assigns into Triton scalars; leaves the kernel's module as it is."""

    def _compile_and_exec(self, tree: ast.Module) -> Any:
        # a closure over the names that Triton's transformer inserts and the function's own free variables
        given = {"interpreter_semantic": SEMANTIC, **inspect.getclosurevars(self.fn).nonlocals}
        if hasattr(stock, "_InterpreterComparison"):
            given["_InterpreterComparison"] = stock._InterpreterComparison
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


@functools.cache
def _parameters(fn: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any], frozenset[str]]:
    """Names of the parameters, their defaults, and which of them are constexpr."""
    parameters = inspect.signature(fn).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    constexprs = frozenset(n for n, p in parameters.items() if "constexpr" in str(p.annotation))
    return tuple(parameters), defaults, constexprs


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a launch argument."""
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
        return tl.core.tensor(Handle(np.array([value.data_ptr()], np.uint64), ty), ty)
    if isinstance(value, bool):
        return as_tensor(np.array(value), tl.int1)
    if isinstance(value, float):
        return as_tensor(np.array(value, np.float32), tl.float32)
    if isinstance(value, tuple):
        items = [_argument(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return stock._implicit_cvt(value)


def _program_order(count: int, order: int | str | None) -> Iterable[int]:
    if order is None:
        return range(count)
    if order == "reverse":
        return range(count - 1, -1, -1)
    if isinstance(order, str):
        raise ValueError(f'interpret: order is None, "reverse" or a seed to shuffle by, not {order!r}')
    return map(int, np.random.default_rng(order).permutation(count))


def _launch(kernel: Any, args: tuple[Any, ...], kw: dict[str, Any], grid: Any, settings: _Settings) -> None:
    global _running
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
    size = grid(bound) if callable(grid) else grid
    nx, ny, nz = (*(int(n) for n in size), 1, 1)[:3]

    memory = Memory([*tensors, *settings.extra], settings.races) if settings.check else None
    BUILDER.memory, BUILDER.poison = memory, settings.poison
    BUILDER.set_grid_dim(nx, ny, nz)
    body = _rewritten(kernel.fn)
    _running = True
    try:
        with interpreted_language(), np.errstate(all="ignore"):
            values = {n: bound[n] if n in constexprs else _argument(bound[n]) for n in names}
            for i in _program_order(nx * ny * nz, settings.order):
                BUILDER.grid_idx = (i // (ny * nz), i // nz % ny, i % nz)
                if memory is not None:
                    memory.start_program(i, BUILDER.grid_idx)
                body(**values)
    finally:
        _running = False
        BUILDER.memory = None


def _run(original: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.run`: a launch is interpreted, a warmup compiles as always."""

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kw: Any) -> Any:
        if warmup or _settings is None:
            return original(self, *args, grid=grid, warmup=warmup, **kw)
        return _launch(self, args, kw, grid, _settings)

    return run


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.__call__`: a device function called by an interpreted kernel."""

    def call(self: Any, *args: Any, **kw: Any) -> Any:
        return _rewritten(self.fn)(*args, **kw) if _running else original(self, *args, **kw)

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
def _interpreting_triton() -> Iterator[None]:
    """Launches go to the interpreter, and Triton's interpreter module to our operations."""
    new = [
        (jit.JITFunction, "run", _run(jit.JITFunction.run)),
        (jit.JITFunction, "__call__", _call(jit.JITFunction.__call__)),
        (autotuner.Autotuner, "run", _tune(autotuner.Autotuner.run)),
        (stock, "interpreter_builder", BUILDER),
        (stock, "interpreter_semantic", SEMANTIC),
        (stock, "TensorHandle", Handle),
        (stock, "_get_np_dtype", np_dtype),
    ]
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in new]
    for owner, name, value in new:
        setattr(owner, name, value)
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True  # the switch that Triton's own host code asks
            yield
    finally:
        for owner, name, value in old:
            setattr(owner, name, value)


@contextlib.contextmanager
def interpret(
    check: bool = True,
    races: bool = False,
    poison: bool = False,
    order: int | str | None = None,
    extra: Iterable[torch.Tensor] = (),
) -> Iterator[None]:
    """Interpret every kernel launched inside the block, on CPU tensors. Warmups compile as usual.

    check:   raise KernelMemoryError on an access outside the tensor arguments and `extra`, or misaligned.
    races:   also when programs share memory without an atomic, or one reads back its store without a barrier.
    poison:  lanes that a mask switches off in a load without `other` hold NaN (floats) or 0x55 (integers).
    order:   of the programs: None is ascending, "reverse", or a seed to shuffle by.
    extra:   tensors that kernels reach through addresses stored in memory.

    Blocks nest; the innermost settings hold.
    """
    global _settings
    outer, _settings = _settings, _Settings(check or races, races, poison, order, tuple(extra))
    try:
        if outer is None:
            with _interpreting_triton():
                yield
        else:
            yield
    finally:
        _settings = outer


def launch_context(tensor_device: torch.device) -> contextlib.AbstractContextManager[None]:
    """How a fast arm launches on this device: interpreted on the CPU, as usual elsewhere.

    Inside an open `interpret()` it costs nothing and keeps its settings. A host function wraps its launches
    in it, and so runs on CPU tensors through the very kernels that a GPU runs.
    """
    if tensor_device.type != "cpu" or _settings is not None:
        return contextlib.nullcontext()
    return interpret()
