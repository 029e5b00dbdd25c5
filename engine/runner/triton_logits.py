"""Operations on a step's logits by Triton kernels, on a GPU; logits.py documents the interface.

A sampled token is the same as on a CPU, to the last bit: weights are whole numbers that are computed by the same exact
or rounded operations, and whole numbers have the same sum in any order. Log-probabilities need a logarithm, which
differs between devices in the last bit of a float64; they are rounded to float32.

Sampling takes three launches, and three more for a short list if a row has top_k or top_p; then four for top_k and
three for top_p, whose programs end at once if the list was enough. The greedy token takes two, changes take up to four,
masks one. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.gpu_cache import power_of_two
from ..attention.paged_gpu import dependence, is_interpreted, lack
from ..kernels.launching import launch
from ..kernels.logits import TopLogits
from .changes import Changes, Ints, Penalties, Tokens, on_device
from .logits import ONE, ROW_PARAMS, LogitsBackend, TorchLogits

# Logits per tile, as many as the registers hold, and tiles per program. A program takes its tiles one by one, so they
# are few: then a single row has a program for each multiprocessor or two.
TILE, TILES = 2048, 2
WARPS = 8
ENTRIES = 256  # changes per program
# Sizes of the kernels' tables, see engine/kernels/gpu/logits.py.
STATE, COUNT_DIGITS, COUNTS, SUM_DIGITS, SUMS = 6, 4, 256, 3, 1024
TOTAL, GROUP, LENGTH = 1, 512, 512
# A row's parameters, as the kernels read them.
FIELDS = np.dtype(
    [
        ("coldness", np.float64),  # 1 / temperature, rounded to float32; 0: greedy
        ("top_p", np.float64),
        ("u", np.float64),
        ("floor", np.int64),  # the smallest weight that min_p keeps
        ("top_k", np.int64),  # 0: off
    ]
)
# The trial's rows of ROW_PARAMS.
TRIAL = [
    (0.0, 1.0, 0.0, 0.0, 1 << 62),
    (0.8, 1.0, 0.0, 0.3, 1 << 62),
    (1.5, 1.0, 0.01, 0.9, 1 << 62),
    (0.7, 0.9, 0.0, 0.4, 5),
    (1.0, 0.95, 0.02, 0.8, 1 << 62),
    (2.0, 0.5, 0.0, 0.6, 1000),
    (8.0, 0.7, 0.0, 0.6, 1 << 62),  # needs more tokens than a list has
]
MAX_ERROR = 1e-5  # of a log-probability in the trial


class _Memory(NamedTuple):
    """What the kernels of one call add to, zero at first. The tables are empty unless they are needed."""

    state: Tensor  # [rows * STATE] int64
    counts: Tensor  # [rows * COUNT_DIGITS * COUNTS] int32
    sums: Tensor  # [rows * SUM_DIGITS * SUMS] int64


class TritonLogits:
    """Operations on float32 logits on a GPU, see LogitsBackend."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._parts = -(-vocab_size // (TILE * TILES))
        # Without fused multiplications and additions, so that each operation is rounded as on a CPU.
        self._options: dict[str, Any] = {"num_warps": WARPS, "enable_fp_fusion": False}
        self._group = min(GROUP, TILE)
        self._groups = self._parts * TILES * TILE // self._group
        self._plain = {**self._options, **dependence(device)}
        self._tiles = {"SIZE": vocab_size, "TILE": TILE, "TILES": TILES, **self._plain}
        self._in_parts = {"PARTS": self._parts, **self._tiles}
        self._over_parts = {"PARTS_P": power_of_two(max(2, self._parts)), **self._in_parts}

    def best(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from ..kernels.gpu import logits as kernels

        x = self._checked(x)
        tops, ids = self._outputs(x)
        if len(x):
            state, *_ = self._memory(x)
            launch(kernels.find_top, (len(x), self._parts), x, state, state, GROUP=0, **self._tiles)
            self._pick_best(state, tops, ids)
        return tops, ids

    def sample(self, x: Tensor, params: NDArray) -> tuple[Tensor, Tensor]:
        if not params["temperature"].any():
            return self.best(x)
        fields = fields_of(params, self.vocab_size)
        has_k, has_p = bool(fields["top_k"].any()), bool((fields["top_p"] < 1.0).any())
        return self.draw(x, on_device(fields.view(np.int64), self.device), has_k=has_k, has_p=has_p)

    def draw(self, x: Tensor, rows: Tensor, *, has_k: bool, has_p: bool) -> tuple[Tensor, Tensor]:
        """Sample as `sample` does. rows: [rows * 5] int64, FIELDS on the device; has_k, has_p: whether any row may have
        top_k or top_p. Nothing is copied between host and device."""
        from ..kernels.gpu import logits as kernels
        from ..kernels.gpu import shortlist

        x = self._checked(x)
        grid, rows_grid = (len(x), self._parts), (len(x),)
        state, counts, sums = self._memory(x, counts=has_k, sums=has_p)
        weights = x.new_empty(x.shape)
        parts = torch.empty(grid, dtype=torch.int64, device=self.device)
        tops, ids = self._outputs(x)
        is_filtered = has_k or has_p
        maxima = torch.empty(len(x), self._groups, dtype=torch.int32, device=self.device) if is_filtered else state
        launch(kernels.find_top, grid, x, state, maxima, GROUP=self._group * is_filtered, **self._tiles)
        if is_filtered:
            keys, listed = torch.empty(2, len(x), LENGTH, dtype=torch.int32, device=self.device)
            live = -(-self.vocab_size // self._group)
            groups = {"GROUPS": self._groups, "LIVE": live, "LIVE_P": power_of_two(live), **self._plain}
            launch(shortlist.find_bound, rows_grid, rows, state, maxima, **groups)
            launch(shortlist.shortlist, grid, x, rows, state, maxima, keys, listed, GROUP=self._group, **self._tiles)
            launch(shortlist.draw_listed, rows_grid, rows, state, keys, listed, ids, **self._plain)
        for known in range(COUNT_DIGITS) if has_k else ():
            launch(kernels.count_digit, grid, x, rows, state, counts, KNOWN=known, **self._tiles)
        launch(kernels.weigh, grid, x, rows, state, counts, sums, weights, parts, SAMPLE=True, **self._in_parts)
        if has_p:
            for known in range(1, SUM_DIGITS):
                launch(kernels.sum_digit, grid, rows, state, sums, weights, KNOWN=known, **self._tiles)
            launch(kernels.sum_kept, grid, rows, state, sums, weights, parts, **self._in_parts)
        launch(kernels.pick, rows_grid, rows, state, sums, weights, parts, tops, ids, SAMPLE=True, **self._over_parts)
        return tops, ids

    def processed(self, x: Tensor, params: NDArray) -> Tensor:
        """See LogitsBackend. Torch computes it, and waits for the device."""
        return TorchLogits(self.vocab_size, self.device).processed(x, params)

    def distribution(self, x: Tensor, count: int) -> TopLogits:
        """See LogitsBackend. x must not change until the last use of the result."""
        x = self._checked(x)
        values = torch.full((len(x), count), torch.nan, device=self.device)
        indices = torch.zeros(len(x), count, dtype=torch.int64, device=self.device)
        tops, ids = self._outputs(x)
        if not len(x):
            return TopLogits(x, tops.double(), values, indices)
        totals = self._find(x, tops, ids, values, indices)
        values, order = values.sort(dim=1, descending=True, stable=True)
        logs = tops + (totals.double() / ONE).log()
        return TopLogits(x, logs.masked_fill(ids < 0, torch.nan), values, indices.gather(1, order))

    def launch_distribution(self, x: Tensor) -> None:
        """Launch the kernels of `distribution`, and none of torch's."""
        values = torch.empty(len(x), 1, device=self.device)
        indices = torch.empty(len(x), 1, dtype=torch.int64, device=self.device)
        self._find(x, *self._outputs(x), values, indices)

    def _find(self, x: Tensor, tops: Tensor, ids: Tensor, values: Tensor, indices: Tensor) -> Tensor:
        """Find each row's best and its largest logits, in any order; return the sums of weights, a view [rows]."""
        from ..kernels.gpu import logits as kernels

        count, grid = values.shape[1], (len(x), self._parts)
        state, counts, _ = self._memory(x, counts=count > 0)
        fields = np.zeros(len(x), FIELDS)
        fields["coldness"], fields["top_p"], fields["top_k"] = 1.0, 1.0, count
        rows = on_device(fields.view(np.int64), self.device)
        launch(kernels.find_top, grid, x, state, state, GROUP=0, **self._tiles)
        launch(kernels.weigh, grid, x, rows, state, counts, state, x, state, SAMPLE=False, **self._in_parts)
        self._pick_best(state, tops, ids)
        if count:
            tallies = torch.empty(*grid, 2, dtype=torch.int32, device=self.device)
            for known in range(COUNT_DIGITS):
                launch(kernels.count_digit, grid, x, rows, state, counts, KNOWN=known, **self._tiles)
            launch(kernels.tally, grid, x, rows, counts, tallies, **self._in_parts)
            launch(kernels.collect, grid, x, rows, state, counts, tallies, values, indices, **self._over_parts)
        return state[TOTAL::STATE]

    def change(self, x: Tensor, changes: Changes) -> None:
        from ..kernels.gpu import changes as kernels

        if not self._checked(x).is_set_to(x):
            raise ValueError("logits that are changed in place must be contiguous")

        def at(tokens: Tokens) -> Ints:
            return tokens.rows * self.vocab_size + tokens.ids

        if changes.penalized is not None:
            tokens, penalties = changes.penalized
            self._entries(kernels.penalize, x, at(tokens), _float32(np.stack(penalties)))
        if changes.biased is not None:
            tokens, biases = changes.biased
            self._entries(kernels.add, x, at(tokens), _float32(biases))
        if changes.exclusive:
            self.forbid(x, *_masks(changes.exclusive, self.vocab_size))
        if changes.excluded is not None:
            self._entries(kernels.exclude, x, at(changes.excluded))

    def forbid(self, x: Tensor, rows: Ints, bits: NDArray[np.int32]) -> None:
        from ..kernels.gpu import changes as kernels

        if not self._checked(x).is_set_to(x):
            raise ValueError("logits that are changed in place must be contiguous")
        if bits.shape[1] * 32 < self.vocab_size:
            raise ValueError(f"masks of {bits.shape[1] * 32} tokens for a vocabulary of {self.vocab_size}")
        if len(rows):
            launch(kernels.forbid, (len(rows), -(-self.vocab_size // TILE)),
                x, on_device(rows, self.device), on_device(bits, self.device),
                SIZE=self.vocab_size, WORDS=bits.shape[1], TILE=TILE, **self._options,
            )  # fmt: skip

    def _entries(self, kernel: Any, x: Tensor, at: Ints, *columns: NDArray) -> None:
        """Launch a kernel that changes the logits at these offsets."""
        if len(at):
            uploaded = [on_device(column, self.device) for column in (at, *columns)]
            kernel[(-(-len(at) // ENTRIES),)](x, *uploaded, len(at), TILE=ENTRIES, **self._options)

    def _pick_best(self, state: Tensor, tops: Tensor, ids: Tensor) -> None:
        """Write the largest logits that `find_top` has found, and their indices."""
        from ..kernels.gpu import logits as kernels

        unused = state
        launch(
            kernels.pick,
            (len(tops),),
            unused,
            state,
            unused,
            unused,
            unused,
            tops,
            ids,
            SAMPLE=False,
            **self._over_parts,
        )

    def _memory(self, x: Tensor, *, counts: bool = False, sums: bool = False) -> _Memory:
        sizes = STATE, COUNT_DIGITS * COUNTS // 2 if counts else 0, SUM_DIGITS * SUMS if sums else 0
        zeros = torch.zeros(len(x) * sum(sizes), dtype=torch.int64, device=self.device)
        state, pairs, masses = zeros.split([len(x) * size for size in sizes])
        return _Memory(state, pairs.view(torch.int32), masses)

    def _outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for a logit and an index for each row."""
        return x.new_empty(len(x)), torch.empty(len(x), dtype=torch.int64, device=self.device)

    def _checked(self, x: Tensor) -> Tensor:
        """Return contiguous x, which begins at a multiple of 16 bytes: elsewhere kernels would be compiled again."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.vocab_size:
            raise ValueError(f"not [rows, {self.vocab_size}] of float32: {tuple(x.shape)} of {x.dtype}")
        return x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def fields_of(params: NDArray, vocab_size: int) -> NDArray:
    """Return [rows] of ROW_PARAMS as FIELDS."""
    fields = np.zeros(len(params), FIELDS)
    random = params["temperature"] > 0
    coldness = 1.0 / np.where(random, params["temperature"], 1.0)
    fields["coldness"] = np.where(random, coldness.astype(np.float32), 0.0)
    fields["top_p"] = np.where(random, params["top_p"], 1.0)
    fields["u"] = params["u"]
    fields["floor"] = np.maximum(np.ceil(params["min_p"] * ONE), 1)
    fields["top_k"] = np.where(random & (params["top_k"] < vocab_size), params["top_k"], 0)
    return fields


def _masks(exclusive: tuple[Tokens, ...], vocab_size: int) -> tuple[Ints, NDArray[np.int32]]:
    """Return the rows of Changes.exclusive, and a mask of the tokens that each may sample, see LogitsBackend.forbid."""
    allowed: dict[int, NDArray[np.bool_]] = {}
    for tokens in exclusive:
        for row in np.unique(tokens.rows).tolist():
            own = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
            own[tokens.ids[tokens.rows == row]] = True
            allowed[row] = own & allowed.get(row, own)
    bits = np.packbits(np.stack([*allowed.values()]), axis=1, bitorder="little")
    return np.array([*allowed], np.int64), bits.view(np.int32)


def _float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # a huge number becomes infinite
        return values.astype(np.float32)


# -- whether the kernels can be used ----------------------------------------------------------------------------------


def objection(vocab_size: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernels cannot sample for a model with this dtype on a device, or None."""
    if device.type != "cuda" and not is_interpreted():
        return "the Triton kernels need a CUDA device"
    if dtype == torch.float64:
        return "the Triton kernels do not sample from float64 logits"
    return lack() or trial(vocab_size, device)


@torch.inference_mode()
def trial(vocab_size: int, device: torch.device) -> str | None:
    """Run each kernel for the model's vocabulary, and compare it with torch; return why they cannot be used, or None.

    The compiled kernels are kept, so this costs a start no more than their first use would.
    """
    try:
        wrong = _wrong(vocab_size, device)
    except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
        lines = (str(problem).strip().splitlines() or [""])[0]
        return f"the Triton kernels do not run on this device: {type(problem).__name__}: {lines[:200]}"
    return None if wrong is None else f"the Triton kernels compute wrong results on this device ({wrong})"


def _wrong(vocab_size: int, device: torch.device) -> str | None:
    """Return what the kernels compute otherwise than torch, or None."""
    # Rounded to bfloat16, so that some logits are equal.
    x = 4 * torch.randn(len(TRIAL), vocab_size, generator=torch.Generator().manual_seed(0))
    x = x.bfloat16().float().to(device)
    ours = _results(TritonLogits(vocab_size, device), x, x)
    torchs = _results(TorchLogits(vocab_size, device), x, x.double())
    for (name, error, found), (_, _, wanted) in zip(ours, torchs, strict=True):
        if not torch.allclose(found.double(), wanted.double(), rtol=0.0, atol=error):
            return name
    return None


def _results(backend: LogitsBackend, x: Tensor, exact: Tensor) -> Iterator[tuple[str, float, Tensor]]:
    """Yield the name, the permitted error and the result of each operation. exact: x as `distribution` gets it."""
    rows, vocab_size = x.shape
    params = np.array(TRIAL, ROW_PARAMS)
    yield "the largest logit", 0.0, torch.stack(backend.best(x))
    for number in (rows // 2, rows):  # the first half has neither top_k nor top_p
        yield "sampling", 0.0, backend.sample(x[:number], params[:number])[1]
    count = min(2, vocab_size)
    columns = backend.distribution(exact, count).columns(torch.zeros(rows, dtype=torch.int64, device=x.device))
    yield "log-probabilities", MAX_ERROR, columns
    tokens = Tokens(np.arange(rows), np.arange(rows) % vocab_size)
    numbers = np.linspace(0.5, 1.5, rows)
    penalties = Penalties(numbers, numbers, numbers)
    exclusive, excluded = (Tokens(tokens.rows[part], tokens.ids[part]) for part in (slice(0, 1), slice(1, 2)))
    changed = x.clone()
    backend.change(changed, Changes((tokens, penalties), (tokens, numbers), (exclusive,), excluded))
    yield "penalties and biases", 0.0, changed
    bits = np.full((1, -(-vocab_size // 32)), 0x55555555, np.int32)
    backend.forbid(changed, np.array([2]), bits)
    yield "masks", 0.0, changed
