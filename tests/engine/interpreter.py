"""Makes Triton's interpreter faster and its products like a GPU's, whose sums do not depend on where a row is."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


class Kept:
    """Functions of triton.language that stay replaced after a launch."""

    def restore(self) -> None:
        pass


def patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Kept]:
    """Return a function that replaces the functions of triton.language once, not at each launch and call."""
    done: set[frozenset[int]] = set()

    def patched(fn: Any) -> Kept:
        modules = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        if modules not in done:
            patch(fn)
            done.add(modules)
        return Kept()

    return patched


def by_name(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that keeps the numpy dtypes of Triton's types."""
    known: dict[str, Any] = {}

    def found(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = dtype_of(kind)
        return known[kind.name]

    return found


def rounded_once(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Return a product that is summed in float64: numpy's library adds the numbers of some rows in another order."""

    def product(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return dot(builder, a, b, d, *options)
        wide = dot(builder, a, b, interpreter.TensorHandle(d.data.astype(np.float64), tl.float64), *options)
        return interpreter.TensorHandle(wide.data.astype(np.float32), tl.float32)

    return product


@functools.cache
def prepare() -> None:
    """Check that Triton interprets, make its products independent of places, and leave out a third of its work."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    interpreter.InterpreterBuilder.create_dot = rounded_once(interpreter.InterpreterBuilder.create_dot)
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    # All tensors are on the host. What copies them there leaves cycles, which would keep them after they are freed.
    interpreter.GridExecutor._init_args_hst = lambda _, args, options: (args, options)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    # Sums and products of integers are computed once more in 64 bits, to report overflows in the debug mode alone.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
