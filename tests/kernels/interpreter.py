"""A second process in which Triton interprets kernels on the CPU, with bf16 as a GPU has it.

Triton decides when it is imported whether it interprets, so the process of the tests cannot do both. `@interpreted`
runs the body of a test there, one process for all tests; arguments travel by pickle.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

import numpy as np
import pytest

Test = TypeVar("Test", bound=Callable[..., None])

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed on this machine")


def interpreted(test: Test) -> Test:
    """Run a test's body in the interpreting process; what it raises there fails the test here."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        if "HYDRAGRAPH_INTERPRETING" in os.environ:
            return test(*args, **kwargs)
        _process().submit(_call, test.__module__, test.__name__, args, kwargs).result()
        return None

    return needs_triton(run)  # pyrefly: ignore[bad-return]


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare)


def _call(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    getattr(import_module(module), name)(*args, **kwargs)


def _prepare() -> None:
    os.environ.update(TRITON_INTERPRET="1", HYDRAGRAPH_INTERPRETING="1", OPENBLAS_NUM_THREADS="1")
    import torch
    from hypothesis import settings

    torch.set_num_threads(1)
    settings.register_profile("interpreter", deadline=None, derandomize="CI" in os.environ, database=None)
    settings.load_profile("interpreter")
    mend()


# Corrections of Triton's interpreter (3.6 and 3.9): it multiplies bf16 as if its bits were integers, truncates
# where a GPU rounds to nearest even, and takes a scalar bool in a mask for an int.


def _widen(bits: Any) -> Any:
    """uint16 bits of bf16 -> fp32."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def _narrow(values: Any) -> Any:
    """fp32 -> uint16 bits of bf16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def mend() -> None:
    """Replace the interpreter's methods that get bf16 and bool masks wrong."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot, binary, unary = builder.cast_impl, builder.create_dot, builder.binary_op, builder.unary_op
    convert, splat = builder.create_fp_to_fp, builder.create_splat
    comparisons = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
    bitwise = (np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift)

    def is_half(x: Any) -> bool:
        return isinstance(x, handle) and bool(x.dtype.scalar == tl.bfloat16)

    def wide(x: Any) -> Any:
        return handle(_widen(x.data), tl.float32) if is_half(x) else x

    def mended_cast(self: Any, source: Any, to: Any) -> Any:
        if to.scalar != tl.bfloat16:
            return wide(source) if is_half(source) and to.scalar == tl.float32 else cast(self, wide(source), to)
        if is_half(source):
            return source
        single = source if source.dtype.scalar == tl.float32 else cast(self, source, tl.float32)
        return handle(_narrow(single.data), tl.bfloat16)

    def mended_convert(self: Any, source: Any, to: Any, rounding: Any) -> Any:
        ours = {source.dtype.scalar, to.scalar} <= {tl.bfloat16, tl.float32, tl.float16}
        return mended_cast(self, source, to) if ours else convert(self, source, to, rounding)

    def mended_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, wide(a), wide(b), *rest)

    def mended_binary(self: Any, a: Any, b: Any, op: Any) -> Any:
        if not (is_half(a) and is_half(b)) or op in bitwise:
            return binary(self, a, b, op)
        found = op(_widen(a.data), _widen(b.data))
        return handle(found, tl.int1) if op in comparisons else handle(_narrow(found), tl.bfloat16)

    def mended_unary(self: Any, a: Any, op: Any) -> Any:
        return handle(_narrow(op(_widen(a.data))), tl.bfloat16) if is_half(a) else unary(self, a, op)

    def mended_splat(self: Any, *args: Any) -> Any:
        found = splat(self, *args)
        source = next(x for x in args if isinstance(x, handle))
        return handle(found.data.astype(np.bool_), found.dtype) if source.data.dtype == np.bool_ else found

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = mended_cast, mended_convert, mended_dot
    builder.binary_op, builder.unary_op, builder.create_splat = mended_binary, mended_unary, mended_splat
