"""Records what an operation of Triton's interpreter computes with numpy, and repeats that.

At each operation of each program the interpreter finds out which types the operands have, what they are converted to
and how they are broadcast, which takes several times as long as numpy's work. All of it follows from the types of
tensors and from the values of the other arguments. So it is done once for these, and recorded as the calls of the
interpreter's builder, whose methods do the work; later the same calls are made with other tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

NOT_RECORDED = {"dot", "dot_scaled"}  # tests replace what computes them
# What these return depends on nothing else than their arguments.
PURE = ("get_", "create_splat", "create_broadcast", "create_expand_dims", "create_make_range", "create_int_cast")
# numpy broadcasts the operands of these by itself.
BROADCASTING = {
    "create_add", "create_fadd", "create_sub", "create_fsub", "create_mul", "create_fmul", "create_fdiv",
    "create_addptr", "create_and", "create_or", "create_maxnumf", "create_minnumf", "create_maxsi", "create_minsi",
    *(f"create_icmp{each}" for each in ("SLE", "SLT", "SGE", "SGT", "ULE", "ULT", "UGE", "UGT", "EQ", "NE")),
    *(f"create_fcmp{each}" for each in ("OLT", "OGT", "OLE", "OGE", "OEQ", "UNE")),
}  # fmt: skip
PLAIN = {int, bool, str, type(None)}
WHOLE = slice(None)
MOST = 20_000  # kinds of arguments of one operation; more are not kept


class Recording:
    """A builder that calls the interpreter's and records it."""

    def __init__(self, inputs: list[TensorHandle]) -> None:
        self.names: dict[int, str] = {}  # by the ids of objects: inputs h0, h1, ..., results t.., all others c..
        self.known: dict[str, Any] = {}  # the objects, kept so that no other one gets the id of one
        self.constants: dict[int, TensorHandle] = {}
        self.calls: list[tuple[str, str, list[str]]] = []  # result, method, arguments
        self.is_whole = True
        for place, handle in enumerate(inputs):
            self._add(f"h{place}", handle)

    def _add(self, name: str, value: Any) -> str:
        self.names[id(value)], self.known[name] = name, value
        return name

    def __getattr__(self, method: str) -> Any:
        member = getattr(interpreter.interpreter_builder, method)
        if not callable(member):
            return member

        def call(*args: Any) -> Any:
            result = member(*args)
            if result is not None and not isinstance(result, TensorHandle):
                self.is_whole &= not isinstance(result, tuple)
                return result  # a type
            handles = [id(each) for each in args if isinstance(each, TensorHandle)]
            if method.startswith(PURE) and all(each in self.constants for each in handles):
                self.constants[id(result)] = result
                return result
            self.is_whole &= all(each in self.names or each in self.constants for each in handles)
            self.is_whole &= not any(isinstance(each, tuple | list) and _has_handles(each) for each in args)
            arguments = [self.names.get(id(each)) or self._add(f"c{len(self.known)}", each) for each in args]
            self.calls.append((self._add(f"t{len(self.known)}", result), method, arguments))
            return result

        return call

    def _needed(self) -> list[tuple[str, str, list[str]]]:
        """Return the calls without those that only make an operand as large as the other one."""
        calls, replaced = [], dict[str, str]()
        for result, method, arguments in self.calls:
            users = [each for each in self.calls if result in each[2]]
            if method in ("create_splat", "create_broadcast") and len(users) == 1 and users[0][1] in BROADCASTING:
                source = arguments[method == "create_splat"]
                others = [self.known[each] for each in users[0][2] if each != result]
                before, after = (self.known[name].data.dtype for name in (source, result))
                # A splat may convert the result of a comparison, whose array is of another type than its handle.
                is_same = method == "create_broadcast" or (before == after and after.kind != "b")
                if is_same and len(others) == 1 and others[0].data.shape == self.known[result].data.shape:
                    replaced[result] = source
                    continue
            calls.append((result, method, [replaced.get(each, each) for each in arguments]))
        return calls

    def function(self, results: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return a function of the inputs' handles that makes the calls and returns tensors like these results. None if
        something is in them that was not recorded."""
        for each in results:
            if id(each.handle) in self.constants:
                self._add(f"c{len(self.known)}", each.handle)
        if not self.is_whole or any(id(each.handle) not in self.names for each in results):
            return None
        scope: dict[str, Any] = {name: value for name, value in self.known.items() if name[0] == "c"}
        scope["tensor"] = tl.tensor
        lines = []
        for result, method, arguments in self._needed():
            scope[method] = getattr(interpreter.interpreter_builder, method)
            lines.append(f" {result} = {method}({', '.join(arguments)})")
        for place, each in enumerate(results):
            scope[f"kind{place}"] = each.type
        tensors = [f"tensor({self.names[id(each.handle)]}, kind{place})" for place, each in enumerate(results)]
        inputs = ", ".join(name for name in self.known if name[0] == "h")
        exec("\n".join([f"def repeated({inputs}):", *lines, f" return {', '.join(tensors) or None}"]), scope)
        return scope["repeated"]  # type: ignore[no-any-return]


def _has_handles(values: Any) -> bool:
    return any(isinstance(each, TensorHandle | tl.tensor) for each in values)


def _add_value(value: Any, key: list[Any], kept: list[Any]) -> bool:
    """Add to a key what an argument that is no tensor is; return whether that can be known."""
    kind = value.__class__
    key.append(kind)
    if kind is tl.constexpr:
        value = value.value
        kind = value.__class__
        key.append(kind)
    if kind in PLAIN:
        key.append(value)
    elif kind is float:
        key.append(value.hex())  # there are two zeros
    elif kind is slice:
        return all([_add_value(each, key, kept) for each in (value.start, value.stop, value.step)])
    elif isinstance(value, tuple | list | tl.tuple):
        key.append(len(value))
        return all([_add_value(each, key, kept) for each in value])
    elif isinstance(value, tl.dtype | tl.PropagateNan):
        key.append(id(value))
        kept.append(value)
    else:
        return False
    return True


def recorded(function: Callable[..., Any], semantic: TritonSemantic[Any]) -> Callable[..., Any]:
    """Return an operation of triton.language that is recorded once for each kind of arguments, then repeated."""
    found: dict[tuple[Any, ...], tuple[Callable[..., Any] | None, list[Any]]] = {}
    unary: dict[tuple[Any, ...], Callable[..., Any]] = {}  # by a tensor, and by a constant or indices
    binary: dict[tuple[Any, ...], Callable[..., Any]] = {}  # by two tensors
    tensor, constexpr, is_recorded = tl.tensor, tl.constexpr, function.__name__ not in NOT_RECORDED

    def called(*args: Any, **options: Any) -> Any:
        """Look for the most frequent arguments by short keys, which are made in less time than what is repeated."""
        if options or len(args) != 2 or args[0].__class__ is not tensor:
            return general(args, options)
        first, second = args
        kind = second.__class__
        if kind is tensor:
            key: tuple[Any, ...] = id(first.type), id(second.type), first.handle is second.handle
            repeated = binary.get(key)
            if repeated is not None:
                return repeated(first.handle, second.handle)
            return general(args, options, binary, key)
        if kind is constexpr:
            second = second.value
        if second.__class__ in PLAIN or (second.__class__ is float and second):  # there are two zeros
            key = id(first.type), kind, second.__class__, second
        elif kind is tuple and all([each is None or each == WHOLE for each in second]):
            key = id(first.type), kind, *[each is None for each in second]
        else:
            return general(args, options)
        repeated = unary.get(key)
        return general(args, options, unary, key) if repeated is None else repeated(first.handle)

    def general(
        args: tuple[Any, ...], options: dict[str, Any], frequent: dict[Any, Any] | None = None, short: Any = None
    ) -> Any:
        if "_semantic" in options:  # a part of another operation
            return function(*args, **options)
        key: list[Any] = []
        inputs: list[Any] = []
        kept: list[Any] = []  # what is in the key by its id
        is_known = is_recorded
        for value in (*args, *options, *options.values()):
            kind = value.__class__
            if kind is tensor:
                key.append(id(value.type))
                inputs.append(value.handle)
            elif kind in PLAIN:
                key += kind, value
            else:
                is_known &= _add_value(value, key, kept)
        if len(inputs) == 2:
            key.append(inputs[0] is inputs[1])
        elif inputs:
            ids = [id(each) for each in inputs]
            key += map(ids.index, ids)
        entry = found.get(tuple(key)) if is_known else None
        if entry is not None and entry[0] is not None:
            return entry[0](*inputs)
        if not is_known or entry is not None or len(found) >= MOST:
            return function(*args, **options, _semantic=semantic)
        recording = Recording(inputs)
        result = function(*args, **options, _semantic=TritonSemantic(recording))
        results = result if isinstance(result, tuple) and len(result) > 1 else () if result is None else (result,)
        are_tensors = all(isinstance(each, tensor) for each in results)
        kept += [each.type for each in (*args, *options.values()) if isinstance(each, tensor)]
        made = recording.function(results) if are_tensors else None
        found[tuple(key)] = made, kept
        if frequent is not None and made is not None:
            frequent[short] = made
        return result

    return called
