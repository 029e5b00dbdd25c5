"""Reads `quantization_config` of a config.json: which weights are quantized, and how. The object is not trusted."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..files import shown
from ..types import ModelError

BLOCK = 32  # columns of a weight that share a scale in the kernels
HEAD = "lm_head"
MAX_PATTERNS = 64  # regular expressions, each compared with the name of every weight
MAX_GROUP = 1 << 24
# The types of blocks that hold the numbers, by their bits and whether all zero points are in the middle.
FLOAT4 = "MXFP4"
TYPES = {(4, True): "Q4_0", (4, False): "Q4_Z", (8, True): "Q8_0"}
LOOK_AROUND = re.compile(r"\(\?<?[=!]")  # which regular expressions in linear time lack
EXPERTS, LAYER = ".experts.", re.compile(r"(?<=\.layers)\.\d+\.")  # in names of modules
UNPACKED = "use the unquantized version of the model"
REMEDIES = {
    "bitsandbytes": f"{UNPACKED}, with `quantization=int8` or `quantization=int4` for as little memory",
}
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a weight is quantized. A number is scale * (stored - zero point)."""

    layouts: tuple[str, ...]  # that the weight may have: keys of layouts.LAYOUTS
    bits: int
    is_float: bool = False
    symmetric: bool = True  # all zero points are in the middle
    rows: int | None = 1  # that share a scale; None: all
    columns: int | None = None
    zeros_less_one: bool = False  # whether one must be added to the stored zero points
    weights_only: bool = False  # the checkpoint was made for products whose activations are not rounded

    @property
    def middle(self) -> int:
        """The zero point of integers in the middle."""
        return 1 << (self.bits - 1)

    def blocks_type(self, columns: int) -> str | None:
        """Return the type of blocks for a weight with this number of columns; None: it must be dequantized."""
        shared = self.columns or columns
        if shared % BLOCK or columns % BLOCK:
            return None
        if self.is_float:
            return FLOAT4 if self.bits == 4 else None
        return TYPES.get((self.bits, self.symmetric))


@dataclass(frozen=True, slots=True)
class Quantization:
    """A checkpoint's quantization."""

    method: str
    select: Callable[[str], Scheme | None]

    def scheme(self, weight: str) -> Scheme | None:
        """Return how a weight is quantized according to config.json; None: it is not."""
        return self.select(weight.removesuffix(".weight"))


def parse(found: object, file: str = "config.json") -> Quantization:
    """Return the quantization of a `quantization_config`. Raises ModelError if it is not supported.

    `file`: the name of the file that it was read from, for errors.
    """
    if not isinstance(found, Mapping):
        raise ModelError(f"{file}: quantization_config must be an object")
    method = found.get("quant_method", "unnamed")
    reader = METHODS.get(method) if isinstance(method, str) else None
    if reader is None:
        name = shown(method)
        remedy = REMEDIES.get(name, UNPACKED)
        raise ModelError(f"{file} asks for {name} quantization, which is not supported; {remedy}")
    try:
        return Quantization(method, reader(found))
    except _InvalidError as error:
        raise ModelError(f"{file}: {error}") from None


Weights = tuple[tuple[str, ...], tuple[int, ...], int]  # names, rows of each, and columns
TypeOf = Callable[[str, int], str | None]


def count_blocks(
    linears: Iterable[Weights], type_of: TypeOf, scheme: Callable[[str], object]
) -> tuple[dict[str, int], int]:
    """Return the numbers of a model's weights by the type of blocks that hold them, and the number of those that are
    dequantized.

    `linears`: the weights of each linear layer of the decoder, which are in blocks together or not at all. `type_of`:
    the type of blocks for a weight's name and columns; `scheme`: None if a weight is not quantized.
    """
    in_blocks: Counter[str] = Counter()
    dequantized = 0
    for names, rows, columns in linears:
        kinds = [type_of(name, columns) for name in names]
        if None in kinds:
            dequantized += sum(count for name, count in zip(names, rows, strict=True) if scheme(name)) * columns
            continue
        for kind, count in zip(kinds, rows, strict=True):
            assert kind is not None
            in_blocks[kind] += count * columns
    return dict(in_blocks), dequantized


# -- methods ----------------------------------------------------------------------------------------------------------


def _gptq(found: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    stored = found.get("checkpoint_format") or found.get("format") or "gptq"  # GPTQModel calls it format, too
    if stored not in ("gptq", "gptq_v2") or found.get("is_marlin_format"):
        raise _refused("GPTQ", f"the format {shown(stored)}")
    if found.get("pack_dtype", "int32") != "int32":
        raise _refused("GPTQ", f"numbers packed in {shown(found['pack_dtype'])}")
    dynamic = found.get("dynamic") or {}
    # Names of modules that are not quantized begin with "-:": the checkpoint shows which these are.
    if not isinstance(dynamic, Mapping) or not all(str(key).startswith("-:") for key in dynamic):
        raise _refused("GPTQ", "settings that differ from weight to weight (`dynamic`)")
    bits = _bits(found, "bits", (4, 8))
    scheme = Scheme(
        ("gptq",),
        bits,
        symmetric=found.get("sym") is True,
        columns=_group(found),
        zeros_less_one=stored == "gptq",
    )
    key = "modules_in_block_to_quantize"
    only = found.get(key)
    if only is not None and not isinstance(only, list):
        raise _InvalidError(f"{key} must be a list of lists")
    named = None if only is None else {name for names in only for name in _list(names, key)}
    has_head = found.get("lm_head") is True

    def select(module: str) -> Scheme | None:
        if module == HEAD:
            return scheme if has_head else None
        return scheme if named is None or _is_within(module, named) else None

    return select


def _awq(found: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    version = found.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refused("AWQ", f"the format {shown(version)}")
    if found.get("zero_point", True) is not True:
        raise _refused("AWQ", "weights without zero points")
    scheme = Scheme(("awq",), _bits(found, "bits", (4,)), symmetric=False, columns=_group(found))
    skipped = _names(found, "modules_to_not_convert")
    return lambda module: None if module == HEAD or _is_within(module, skipped) else scheme


def _auto_round(found: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    stored = found.get("packing_format")
    reader = AUTO_ROUND.get(stored) if isinstance(stored, str) else None
    if reader is None:
        raise _refused("auto-round", f"the format {shown(stored)}; {', '.join(AUTO_ROUND)} are supported")
    if found.get("data_type", "int") != "int":
        raise _refused("auto-round", f"numbers of the type {shown(found['data_type'])}")
    extra = found.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(each, Mapping) for each in extra.values()):
        raise _InvalidError("extra_config of quantization_config must be an object of objects")
    for each in extra.values():
        # Modules of 16 bits or more are not quantized: the checkpoint shows which these are.
        is_plain = isinstance(each.get("bits"), int) and each["bits"] >= 16
        if not is_plain and any(each[key] != found.get(key) for key in ("bits", "group_size", "sym") if key in each):
            raise _refused("auto-round", "settings that differ from weight to weight (`extra_config`)")
    return reader(found)


def _modelopt(found: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    algorithm = found.get("quant_algo")
    if algorithm != "FP8":
        raise _refused("modelopt", f"weights in {shown(algorithm)}")
    select = _fp8(found)
    names = _names(found, "ignore") | _names(found, "exclude_modules")  # the latter in a file of its own
    is_ignored = _Patterns().compile({_glob(pattern) for pattern in names})
    return lambda module: None if is_ignored(module) else select(module)


def _fp8(found: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    block = found.get("weight_block_size")
    if block is None:
        block = (128, 128)  # if the scales are neither one nor one for each row
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(map(_is_size, block)):
        raise _InvalidError(f"weight_block_size must be two positive whole numbers, not {shown(block)}")
    scheme = Scheme(("float8",), 8, is_float=True, rows=block[0], columns=block[1])
    skipped = _names(found, "modules_to_not_convert") | _names(found, "ignored_layers")
    return lambda module: None if module == HEAD or _is_within(module, skipped) else scheme


def _mxfp4(found: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    scheme = Scheme(("mxfp4",), 4, is_float=True, columns=BLOCK)
    skipped = _names(found, "modules_to_not_convert")

    def select(module: str) -> Scheme | None:
        every = LAYER.sub(".*.", module)  # names of modules have * for the layer
        return (
            scheme if EXPERTS in module and not _is_within(every, skipped) and not _is_within(module, skipped) else None
        )

    return select


def _compressed_tensors(found: Mapping[str, Any]) -> Callable[[str], Scheme | None]:
    sparsity = found.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise _refused("compressed-tensors", f"the sparse format {shown(sparsity['format'])}")
    if found.get("transform_config"):
        raise _refused("compressed-tensors", "transforms of the activations (`transform_config`)")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups or not all(isinstance(each, Mapping) for each in groups.values()):
        raise _InvalidError("config_groups of quantization_config must be an object of objects")
    named: list[tuple[Callable[[str], bool], Scheme | None]] = []
    general: Scheme | None = None
    patterns = _Patterns()
    for group in groups.values():
        stored = group.get("format") or found.get("format")
        if stored not in FORMATS:
            raise _refused("compressed-tensors", f"the format {shown(stored)}; {', '.join(FORMATS)} are supported")
        scheme = _scheme(group.get("weights"), weights_only=group.get("input_activations") is None)
        targets = _names(group, "targets")
        if "Linear" in targets:
            general = scheme
        named.append((patterns.compile(targets), scheme))
    # Patterns that cannot be used are left out: the checkpoint shows which modules are not quantized.
    ignored = {name for name in _names(found, "ignore") if not name.startswith("re:") or not LOOK_AROUND.search(name)}
    is_ignored = patterns.compile(ignored)

    def select(module: str) -> Scheme | None:
        if is_ignored(module):
            return None
        return next((scheme for matches, scheme in named if matches(module)), general)

    return select


AUTO_ROUND = {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}
METHODS: dict[str, Callable[[Mapping[str, Any]], Callable[[str], Scheme | None]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "auto-round": _auto_round,
    "modelopt": _modelopt,
}


def _scheme(weights: object, *, weights_only: bool) -> Scheme | None:
    """Return the scheme of `weights` in a group of compressed-tensors; None: only activations are quantized."""
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise _InvalidError("weights in config_groups must be an object")
    kind = weights.get("type", "int")
    if kind not in ("int", "float"):
        raise _refused("compressed-tensors", f"numbers of the type {shown(kind)}")
    bits = _bits(weights, "num_bits", (4, 8) if kind == "int" else (8,))
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    rows: int | None = 1
    columns: int | None = None
    if strategy == "tensor":
        rows = None
    elif strategy == "group":
        columns = _group(weights)
    elif strategy == "block":
        block = weights.get("block_structure")
        if not isinstance(block, list) or len(block) != 2 or not all(map(_is_size, block)):
            raise _InvalidError(f"block_structure must be two positive whole numbers, not {shown(block)}")
        rows, columns = block
    elif strategy != "channel":
        raise _refused("compressed-tensors", f"scales by {shown(strategy)}")
    return Scheme(
        ("float8",) if kind == "float" else ("packed", "int8") if bits == 8 else ("packed",),
        bits,
        is_float=kind == "float",
        symmetric=weights.get("symmetric", True) is True,
        rows=rows,
        columns=columns,
        weights_only=weights_only,
    )


# -- values -----------------------------------------------------------------------------------------------------------


class _InvalidError(Exception):
    """A value that cannot be used. Readers raise it, and `parse` adds the name of the file."""


def _refused(method: str, what: str) -> ModelError:
    return ModelError(f"{method} checkpoints with {what} are not supported; {UNPACKED}")


def _bits(found: Mapping[str, Any], key: str, supported: tuple[int, ...]) -> int:
    bits = found.get(key)
    if isinstance(bits, bool) or bits not in supported:
        known = " and ".join(map(str, supported))
        raise _InvalidError(f"weights of {shown(bits)} bits are not supported, {known} are; {UNPACKED}")
    return int(bits)


def _group(found: Mapping[str, Any]) -> int | None:
    """Return group_size, None for -1: a row is one group."""
    size = found.get("group_size", 128)
    if size == -1:
        return None
    if not _is_size(size):
        raise _InvalidError(f"group_size must be -1 or a positive whole number, not {shown(size)}")
    return int(size)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_GROUP


def _names(found: Mapping[str, Any], key: str) -> set[str]:
    """Return the names in a list; none if it is missing."""
    return set() if found.get(key) is None else _list(found[key], key)


def _list(names: object, key: str) -> set[str]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _InvalidError(f"{key} must be a list of names")
    return set(names)


def _is_within(module: str, names: Collection[str]) -> bool:
    """Return whether some part of a module's dotted name is among the names."""
    parts = module.split(".")
    ends = range(1, len(parts) + 1)
    return any(".".join(parts[start:end]) in names for end in ends for start in range(end))


class _Patterns:
    """Compiles the patterns of compressed-tensors: names, and regular expressions after `re:`."""

    def __init__(self) -> None:
        self._count = 0

    def compile(self, patterns: set[str]) -> Callable[[str], bool]:
        names = {pattern for pattern in patterns if not pattern.startswith("re:")}
        expressions = [_expression(pattern) for pattern in sorted(patterns - names)]
        self._count += len(expressions)
        if self._count > MAX_PATTERNS:
            raise _InvalidError(f"the lists of modules have more than {MAX_PATTERNS} regular expressions")
        return lambda module: module in names or any(matches(module) for matches in expressions)


def _glob(pattern: str) -> str:
    """Return a pattern of modelopt, in which * stands for any characters, as one of compressed-tensors."""
    return f"re:{'.*'.join(map(re.escape, pattern.split('*')))}$" if "*" in pattern else pattern


def _expression(pattern: str) -> Callable[[str], bool]:
    """Return the test of a regular expression at the start of a name. Its time is linear, which `re` cannot promise."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema  # few checkpoints need it

    try:
        return SchemaValidator(core_schema.str_schema(pattern=f"^(?:{pattern[3:]})")).isinstance_python
    except SchemaError as error:
        reason = re.sub(r"\s+", " ", str(error).strip()).rpartition("error: ")[2]
        raise _InvalidError(f"the pattern {shown(pattern)} cannot be used: {reason}") from None
