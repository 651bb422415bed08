"""Triton's interpreter with a GPU's arithmetic, for machines that have none.

It must be on before Triton is first imported: decorated functions, Triton's own among them, are bound to
it then. Two things that it leaves to numpy are replaced, since kernels are judged by their bits:

* bfloat16 lies in it as raw 16-bit integers: products multiply those, and rounding cuts off. Here
  products read numbers, and rounding is to nearest, ties to even.
* A product is numpy's BLAS, which on some processors computes the rows of one tile by unequal kernels.
  Here every element is one chain of additions along the inner axis, as on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import numpy as np
import torch

MISSING = None if importlib.util.find_spec("triton") else "needs Triton: pip install triton (it is built for Linux)"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def enable() -> None:
    """Import Triton under its interpreter, in this process alone. Does nothing where a GPU or no Triton is."""
    if MISSING or DEVICE.type == "cuda" or "triton" in sys.modules:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.runtime.interpret = True  # stays, while the variable would reach child processes
    del os.environ["TRITON_INTERPRET"]
    from triton.runtime.interpreter import (
        InterpretedFunction,
        InterpreterBuilder,
        InterpreterOptions,
        TensorHandle,
        _get_np_dtype,
        _patch_lang,
        interpreter_builder,
    )

    plain_cast, called = InterpreterBuilder.cast_impl, set()

    def call(function, *args, **options):
        if function not in called:  # it would patch the language at every call: a third of the time
            called.add(function)
            _patch_lang(function.fn)
        return function.rewrite()(*args, **options)

    def cast(builder, source, target):
        have, want = str(source.dtype.scalar), str(target.scalar)
        if (have, want) == ("bf16", "fp32"):
            return TensorHandle(_widened(source.data), target.scalar)
        if (have, want) == ("fp32", "bf16"):
            return TensorHandle(_rounded(source.data), target.scalar)
        return plain_cast(builder, source, target)

    def dot(builder, a, b, start, input_precision, max_num_imprecise_acc):
        left, right = (_widened(x.data) if str(x.dtype.scalar) == "bf16" else x.data for x in (a, b))
        total = start.data.astype(np.float32)
        for k in range(left.shape[1]):
            total += left[:, k, None] * right[None, k]
        return TensorHandle(total.astype(_get_np_dtype(start.dtype)), start.dtype.scalar)

    interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)  # as on a GPU, and a fifth of the time
    InterpretedFunction.__call__ = call
    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_dot = dot


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _rounded(numbers: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    up = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet_nan = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(numbers), quiet_nan, up).astype(np.uint16)
