"""Makes Triton's interpreter faster and its products like a GPU's, whose sums do not depend on where a row is."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.engine.tape import recorded

BOOL = np.dtype(bool)
LOGICAL = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.equal, np.not_equal}  # the same for bits as for integers


class Kept:
    """Functions of triton.language that stay replaced after a launch."""

    def restore(self) -> None:
        pass


def patched_once(patch: Callable[[Any], Any]) -> Callable[[Any], Kept]:
    """Return a function that replaces the functions of triton.language once, not at each launch and call."""
    done: set[frozenset[int]] = set()
    seen: set[int] = set()  # modules of kernels, by their globals, which are never freed

    def patched(fn: Any) -> Kept:
        if id(fn.__globals__) not in seen:
            modules = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
            if modules not in done:
                patch(fn)
                done.add(modules)
            seen.add(id(fn.__globals__))
        return Kept()

    return patched


def record(obj: Any, name: str, member: Any, _: Any, scope: Any) -> None:
    """Replace a function of triton.language by one that records what the interpreter does, and then repeats it."""
    scope.set_attr(obj, name, recorded(getattr(member, "__wrapped__", member), interpreter.interpreter_semantic))


def unwrapped_by_type(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that unwraps constants, which knows the types that are none by one look."""
    plain = {tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)}

    def unwrapped(value: Any) -> Any:
        kind = value.__class__
        if kind in plain:
            return value
        return value.value if kind is tl.constexpr else unwrap(value)

    return unwrapped


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


def make_types_once() -> None:
    """Make one type for all blocks of a shape and an element, and what tensors derive from their type once."""
    known: dict[tuple[Any, ...], Any] = {}
    init, tensor_init = tl.block_type.__init__, tl.tensor.__init__

    def new(cls: Any, element: Any, shape: Any) -> Any:
        key = element.name, *(each.value if isinstance(each, tl.constexpr) else each for each in shape)
        if key not in known:
            made = object.__new__(cls)
            init(made, element, shape)
            known[key] = made
        return known[key]

    def of_type(self: Any, handle: Any, kind: Any) -> None:
        derived = kind.__dict__.get("derived")
        if derived is None:
            tensor_init(self, handle, kind)
            kind.derived = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, kind
            self.shape, self.numel, self.dtype = derived

    pointers: dict[tuple[Any, ...], Any] = {}
    pointer_init = tl.pointer_type.__init__

    def pointer(cls: Any, element_ty: Any, address_space: str = "global", const: bool = False) -> Any:
        key = tl.core._unwrap_if_constexpr(element_ty).name, address_space, const
        if key not in pointers:
            pointers[key] = made = object.__new__(cls)
            pointer_init(made, element_ty, address_space, const)
        return pointers[key]

    tl.pointer_type.__new__, tl.pointer_type.__init__ = pointer, lambda *_, **__: None
    tl.block_type.__new__, tl.block_type.__init__ = new, lambda *_: None
    tl.tensor.__init__ = of_type


def binary_op(_: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    """Compute as the interpreter does, which also looks at the size of results that have the type of the operands."""
    left, right = lhs.data, rhs.data
    if left.dtype is BOOL is right.dtype and op not in LOGICAL:
        output = (op(left.astype(np.int8), right.astype(np.int8)) & 1).astype(np.bool_)
    else:
        output = op(left, right)
    kind = lhs.dtype.scalar
    if output.itemsize > left.itemsize and output.itemsize * 8 > max(8, kind.primitive_bitwidth):
        output = output.astype(interpreter._get_np_dtype(kind))
    return interpreter.TensorHandle(output, kind)


def expand_dims(_: Any, arg: Any, axis: int) -> Any:
    return interpreter.TensorHandle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)


def element_bytes(kind: Any) -> int:
    """Return the bytes of an element to which a pointer of this type points; a type keeps it."""
    found: int | None = kind.__dict__.get("element_bytes")
    if found is None:
        element = kind.element_ty
        while hasattr(element, "element_ty"):
            element = element.element_ty
        found = kind.element_bytes = max(1, element.primitive_bitwidth // 8)
    return found


def addptr(_: Any, ptr: Any, offset: Any) -> Any:
    bytes_ = np.multiply(offset.data, element_bytes(ptr.dtype), dtype=np.uint64, casting="unsafe")
    return interpreter.TensorHandle(ptr.data + bytes_, ptr.dtype)


def handle_init(self: Any, data: Any, dtype: Any) -> None:
    """Set what is used of a handle: nothing reads the attributes that hints of kernels add."""
    self.data, self.dtype = data, dtype


def converted_by_torch(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch convert to E4M3: the interpreter halves what it rounds up to a power of two, and ties go up."""

    def converted(numbers: Any, source: Any, target: Any, *options: Any) -> Any:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(numbers, source, target, *options)
        floats = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    return converted


@functools.cache
def prepare() -> None:
    """Check that Triton interprets, make its products independent of places, and leave out half of its work."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)  # of matrices as small as these; threads that wait for each other take CPU time
    interpreter.InterpreterBuilder.create_dot = rounded_once(interpreter.InterpreterBuilder.create_dot)
    interpreter._patch_attr = record
    tl.core._unwrap_if_constexpr = unwrapped_by_type(tl.core._unwrap_if_constexpr)
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    interpreter._convert_float = converted_by_torch(interpreter._convert_float)
    make_types_once()
    interpreter.InterpreterBuilder.binary_op = binary_op
    interpreter.InterpreterBuilder.create_expand_dims = expand_dims
    interpreter.InterpreterBuilder.create_addptr = addptr
    # At each operation the interpreter checks of its own result that the array is no wider than its type.
    interpreter.TensorHandle.__init__ = handle_init
    interpreter.TensorHandle.set_attr = lambda *_: None
    # All tensors are on the host. What copies them there leaves cycles, which would keep them after they are freed.
    interpreter.GridExecutor._init_args_hst = lambda _, args, options: (args, options)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    # Sums and products of integers are computed once more in 64 bits, to report overflows in the debug mode alone.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
