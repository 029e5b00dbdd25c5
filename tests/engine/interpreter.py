"""Makes Triton's interpreter faster: it leaves out work that has no effect on results."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

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


@functools.cache
def hasten() -> None:
    """Check that Triton interprets, and leave out what takes a third of its time."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    # All tensors are on the host. What copies them there leaves cycles, which would keep them after they are freed.
    interpreter.GridExecutor._init_args_hst = lambda _, args, options: (args, options)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    # Sums and products of integers are computed once more in 64 bits, to report overflows in the debug mode alone.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
