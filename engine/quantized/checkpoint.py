"""The tensors of a quantized checkpoint under the names that an unquantized one has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..kernels.blocks import FORMATS
from ..kernels.matmul import BlockRows, Converted, Sources
from ..models.checkpoint import multimodal
from ..models.checkpoint.weights import Checkpoint, Entry
from ..models.gpu.coded import CodedPiece, CodedRows
from ..models.gpu.form import Form
from ..models.gpu.weights import FLOAT8_NAN
from ..types import ModelError
from .blocks import NUMBERS, write_blocks
from .config import BLOCK, HEAD, Quantization, Scheme
from .forms import form_of
from .layouts import INTEGERS, LAYOUTS, Layout, Tensors, count

# Scales of activations and of the KV cache, which are quantized otherwise here, or not at all.
UNUSED = {
    "activation_scale", "input_scale", "input_zero_point", "input_scale_ub", "output_scale", "output_zero_point",
    "q_scale", "k_scale", "v_scale",
}  # fmt: skip
LARGEST_SCALE = torch.finfo(torch.float16).max
LARGEST_POWER = 2.0**63  # of scales without a mantissa, in the kernels
PIECE_NUMBERS = 1 << 20  # read from tensors at once; four times as many take half as much time again
PIECE_ROWS = 32  # rows are read in multiples of this number


@dataclass(frozen=True, slots=True)
class Weight:
    """A quantized weight, and the tensors that hold it: the last part of a tensor's name -> its name."""

    name: str
    scheme: Scheme
    layout: Layout
    shape: tuple[int, ...]
    tensors: dict[str, str]


class QuantizedCheckpoint(Checkpoint):
    """The tensors of a folder, and its quantized weights as if they were plain tensors. Raises ModelError."""

    def __init__(self, files: Checkpoint, quantization: Quantization) -> None:
        self.folder, self.quantization = files.folder, quantization
        self._files, self.renames = files, files.renames
        self._opened = self._files._opened
        self._weights: dict[str, Weight] = {}
        self.entries = dict(self._files.entries)
        # By modules: if the embedding is packed, none of its tensors is named `weight`.
        modules = {name.rpartition(".")[0] for name in self.entries}
        self._prefix, self._head = multimodal.place(f"{module}.weight" for module in modules)
        for name, entry in self._files.entries.items():
            if self._is_of_another_part(name):
                continue
            if (weight := self._weight(name, entry)) is not None:
                for tensor in weight.tensors.values():
                    del self.entries[tensor]
                if weight.name in self.entries:
                    raise ModelError(f"the checkpoint holds {weight.name} both quantized and plain; download it again")
                self._weights[weight.name] = weight
                self.entries[weight.name] = replace(entry, shape=weight.shape)
            elif name.rpartition(".")[2] in UNUSED:
                del self.entries[name]
        if not self._weights:
            raise ModelError(
                f"config.json or a file beside it names {quantization.method} quantization, but the checkpoint holds "
                "no quantized weights; remove quantization_config, or that file"
            )

    @property
    def weights_hash(self) -> str:
        return self._files.weights_hash

    def scheme(self, name: str) -> Scheme | None:
        """Return how a weight of the decoder is quantized; None: it is not. `name`: as in `DecoderSpec.linears`."""
        is_head = name == f"{HEAD}.weight"
        found = self._weights.get(self._head if is_head else self._prefix + name.removeprefix("model."))
        return None if found is None else found.scheme

    def blocks_type(self, name: str, columns: int) -> str | None:
        """Return the type of blocks that a weight is given in; None: it is plain or dequantized."""
        scheme = self.scheme(name)
        return None if scheme is None else scheme.blocks_type(columns)

    def num_bytes_of(self, names: Iterable[str]) -> int:
        return sum(self._num_bytes(name) for name in names)

    def fill(self, targets: Mapping[str, Tensor], progress: Callable[[int], None]) -> None:
        quantized = {name: target for name, target in targets.items() if name in self._weights}
        self._files.fill({name: target for name, target in targets.items() if name not in quantized}, progress)
        with torch.inference_mode():
            for name, target in quantized.items():
                self._dequantize(self._weights[name], target)
                progress(self._num_bytes(name))

    def stored(self, names: Sequence[str], dtype: torch.dtype) -> Sources:
        """Return these tensors in blocks if all of them can be, or their locations if none is quantized; else
        nothing."""
        weights = [self._weights[name] for name in names if name in self._weights]
        if not weights:
            return self._files.stored(names, dtype)
        kinds = [weight.scheme.blocks_type(weight.shape[1]) for weight in weights]
        if len(weights) < len(names) or None in kinds:
            return []
        return [
            Converted(partial(self._blocks, weight, kind, dtype), self._num_bytes(weight.name))
            for weight, kind in zip(weights, kinds, strict=True)
            if kind is not None
        ]

    def coded(self, names: Sequence[str]) -> list[CodedRows]:
        weights = [self._weights[name] for name in names if name in self._weights]
        forms = [form_of(weight.scheme, weight.shape[1]) for weight in weights]
        if len(weights) < len(names) or None in forms:
            return []
        return [
            CodedRows(form, weight.shape, partial(self._code, weight, form), self._num_bytes(weight.name))
            for weight, form in zip(weights, forms, strict=True)
            if form is not None
        ]

    def equal(self, one: str, other: str) -> bool:
        return not {one, other} & self._weights.keys() and self._files.equal(one, other)

    def close(self) -> None:
        self._files.close()

    def _is_of_another_part(self, name: str) -> bool:
        """Return whether a tensor is not of the decoder of a model that also reads images: it is not loaded."""
        own = self._prefix, self._head.removesuffix("weight")
        return self._prefix in multimodal.NESTED and not name.startswith(own)

    def _weight(self, name: str, entry: Entry) -> Weight | None:
        """Return the quantized weight whose numbers a tensor holds; None: the tensor holds none."""
        module, _, last = name.rpartition(".")
        # Plain weights have the name of those in bytes.
        layouts = {
            key: each
            for key, each in LAYOUTS.items()
            if each.main == last and (last != "weight" or each.dtype == entry.dtype)
        }
        if not layouts:
            return None
        scheme = self.quantization.scheme(self.original(f"{module}.weight"))
        if scheme is None:
            raise ModelError(
                f"the checkpoint holds {self.original(name)}, which is quantized, but config.json does not say how"
            )
        layout = next((layouts[key] for key in scheme.layouts if key in layouts), None)
        if layout is None or entry.dtype != layout.dtype or len(entry.shape) != layout.dimensions:
            raise ModelError(f"{name} is not stored as {self.quantization.method} weights of {scheme.bits} bits are")
        weight, shape = f"{module}.weight", layout.shape(entry.shape, scheme)
        if shape[1] % (scheme.columns or 1) and not scheme.is_float:
            raise ModelError(f"{weight} has {shape[1]} columns, which groups of {scheme.columns} do not divide")
        names = {part: f"{module}.{part}" for part in (last, *layout.required, *layout.optional)}
        names = {part: tensor for part, tensor in names.items() if tensor in self._files.entries}
        for part in layout.needed(scheme, names):
            if part not in names:
                raise ModelError(f"the checkpoint lacks {module}.{part}, which {weight} needs; download it again")
        return Weight(weight, self._checked(layout, scheme, shape, names), layout, shape, names)

    def _checked(self, layout: Layout, scheme: Scheme, shape: tuple[int, ...], names: dict[str, str]) -> Scheme:
        """Return the scheme that the shapes of a weight's tensors belong to."""
        wrong = ""
        for each in layout.schemes(scheme):
            expected = layout.expected(shape, each)
            entries = {part: self._files.entries[names[part]] for part in expected if part in names}
            unfit = [
                part for part, (dtypes, shapes) in expected.items()
                if part in entries and (entries[part].dtype not in dtypes or entries[part].shape not in shapes)
            ]  # fmt: skip
            if not unfit:
                return each
            wrong = wrong or unfit[0]
        entry, shapes = self._files.entries[names[wrong]], layout.expected(shape, scheme)[wrong][1]
        raise ModelError(
            f"{names[wrong]} has the shape {list(entry.shape)} in {entry.dtype}, which does not fit a weight of "
            f"{list(shape)}: {list(shapes[0])} would"
        )

    def _num_bytes(self, name: str) -> int:
        """Return the bytes of a weight in the files."""
        weight = self._weights.get(name)
        return self._files.num_bytes_of([name] if weight is None else weight.tensors.values())

    def _read(self, weight: Weight) -> dict[str, Tensor]:
        """Return the tensors of a weight."""
        entries = {part: self._files.entries[name] for part, name in weight.tensors.items()}
        tensors = {part: torch.empty(entry.shape, dtype=entry.dtype) for part, entry in entries.items()}
        self._files.fill({weight.tensors[part]: tensor for part, tensor in tensors.items()}, lambda _: None)
        return tensors

    def _pieces(self, weight: Weight, tensors: Tensors, *, coded: bool = False) -> Iterator[CodedPiece]:
        """Yield the rows of a weight in pieces; `coded`: the bits of floats, else their values."""
        step = max(PIECE_ROWS, PIECE_NUMBERS // max(1, weight.shape[1]) // PIECE_ROWS * PIECE_ROWS)
        for start in range(0, weight.shape[0], step):
            rows = slice(start, min(start + step, weight.shape[0]))
            numbers, zeros, scales = (
                read(tensors, weight.scheme, rows)
                for read in (
                    weight.layout.codes if coded else weight.layout.numbers,
                    weight.layout.zeros,
                    weight.layout.scales,
                )
            )
            assert numbers is not None and scales is not None
            if not scales.isfinite().all():
                raise ModelError(f"{weight.name} has a scale that is not a number; download the checkpoint again")
            yield CodedPiece(rows, numbers, zeros, scales)

    def _dequantize(self, weight: Weight, target: Tensor) -> None:
        """Write a weight's numbers, computed in float32 and then rounded to the target's dtype."""
        tensors = self._read(weight)
        group = _groups(weight, tensors)
        for rows, stored, zeros, scales in self._pieces(weight, tensors):
            numbers = stored.float()
            if zeros is not None:
                numbers -= zeros.float()[:, group]
            elif not weight.scheme.is_float:
                numbers -= weight.scheme.middle
            target[rows].copy_(numbers.mul_(scales[:, group]))

    def _blocks(self, weight: Weight, kind: str, dtype: torch.dtype) -> BlockRows:
        """Return a weight in blocks of a type. Columns are sorted by their groups if these are not contiguous."""
        tensors = self._read(weight)
        group = _groups(weight, tensors)
        order = None
        if not _share(group):
            order = group.argsort(stable=True)
            if not _share(group[order]):
                raise ModelError(f"{weight.name} has groups of columns that {BLOCK} does not divide")
        form = FORMATS[NUMBERS[kind]]
        data = torch.empty(weight.shape[0], weight.shape[1] // BLOCK, form.block_bytes, dtype=torch.uint8)
        blocks = (group if order is None else group[order])[::BLOCK]
        largest = LARGEST_POWER if form.is_coded else LARGEST_SCALE
        for rows, numbers, zeros, scales in self._pieces(weight, tensors, coded=True):
            _check(weight, scales, zeros, largest=largest, has_zeros=form.has_zeros)
            write_blocks(
                data[rows],
                numbers if order is None else numbers[:, order],
                scales[:, blocks],
                zeros[:, blocks] if zeros is not None and form.has_zeros else None,
            )
        order = None if order is None else order.int()
        return BlockRows(data.flatten(1), weight.shape, NUMBERS[kind], dtype, order=order, mapped=False)

    def _code(self, weight: Weight, form: Form) -> tuple[Tensor | None, Iterator[CodedPiece]]:
        """Return the order of a weight's columns, None if they are stored in theirs, and its rows in a form."""
        tensors = self._read(weight)
        group = _groups(weight, tensors)
        contiguous = torch.arange(len(group)) // (form.group or len(group))
        if torch.equal(group, contiguous):
            return None, self._coded(weight, form, tensors, None)
        order = group.argsort(stable=True)
        if not torch.equal(group[order], contiguous):
            raise ModelError(f"{weight.name} has groups of columns that are not of {form.group} each")
        return order, self._coded(weight, form, tensors, order)

    def _coded(self, weight: Weight, form: Form, tensors: Tensors, order: Tensor | None) -> Iterator[CodedPiece]:
        for stored in self._pieces(weight, tensors, coded=True):
            piece = stored if form.is_float else _integers(weight, stored, has_zeros=form.has_zeros)
            if form.is_float and ((piece.numbers & FLOAT8_NAN) == FLOAT8_NAN).any():
                raise ModelError(f"{weight.name} has a weight that is not a number; download the checkpoint again")
            yield piece if order is None else piece._replace(numbers=piece.numbers[:, order])


def _integers(weight: Weight, piece: CodedPiece, *, has_zeros: bool) -> CodedPiece:
    """Return rows of a weight as integers, also those of floats of 4 bits."""
    if weight.scheme.is_float:
        return piece._replace(numbers=INTEGERS[piece.numbers.int()], scales=piece.scales / 2)
    _check(weight, piece.scales, piece.zeros, largest=LARGEST_SCALE, has_zeros=has_zeros)
    return piece if has_zeros else piece._replace(zeros=None)


def _check(weight: Weight, scales: Tensor, zeros: Tensor | None, *, largest: float, has_zeros: bool) -> None:
    """Raise ModelError unless some rows can be stored with scales of at most `largest`, and without zero points if not
    `has_zeros`."""
    if scales.numel() and (scale := float(scales.abs().max())) > largest:
        raise ModelError(f"{weight.name} has a scale of {scale:.3g}, but at most {largest:.3g} is supported")
    if not has_zeros and zeros is not None and (zeros != weight.scheme.middle).any():
        raise ModelError(
            f"{weight.name} has zero points, but config.json calls it symmetric: change `sym` (of "
            "compressed-tensors, `symmetric`) to false there"
        )


def _groups(weight: Weight, tensors: Tensors) -> Tensor:
    """Return the group of each column, [columns] int64."""
    groups = count(weight.shape[1], weight.scheme.columns)
    found = tensors.get(weight.layout.groups)
    if found is None or (found == -1).all():  # as compressed-tensors initializes it
        return torch.arange(weight.shape[1]) // (weight.scheme.columns or weight.shape[1])
    if not ((found >= 0) & (found < groups)).all():
        raise ModelError(f"{weight.tensors[weight.layout.groups]} names groups that {weight.name} does not have")
    return found.long()


def _share(group: Tensor) -> bool:
    """Return whether the columns of each block are of one group."""
    blocks = group.unflatten(0, (-1, BLOCK))
    return bool((blocks == blocks[:, :1]).all())
