"""Chooses kernels with which a token's results have the same bits in any batch on a GPU, and proves it.

What computes a row must add up numbers in one order, whatever else a step has. Norms, gates and the draw compute each
row for itself, PagedGPU.invariant divides a context alike for all rows, and one kernel computes all products
(skinny.multiply, or that of weights.py). Its order of sums is the same for all tiles with as many parts, as far as
its source shows, but a GPU has matrix instructions of several sizes, whose inner order nobody documents. So when a
model is loaded, tokens are computed in several batches with its own weights, and their bits are compared: with the
fastest tiles first, and at last with one tile for all numbers of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ...attention import AttentionBackend, AttentionMeta, KVCache, gpu_plan, paged_gpu
from ...attention.gpu_plan import FEW_ROWS
from ...attention.paged_gpu import PagedGPU
from ...kernels.library import Choice
from ..decoder_layer import Layer
from ..families.family import BEFORE
from ..forward import Forward
from ..layer_inputs import LayerInputs
from ..layers import Linear
from ..mixers.mixer import gpu_limitation
from ..mixers.states import Segments, States
from ..rope import Rotary
from ..spec import ModelSpec
from . import executor as on_gpu
from . import skinny
from .skinny import Choices

Parts = tuple[ModelSpec, Linear, Sequence[Layer], Sequence[Rotary], LayerInputs | None]  # of a model, see OnGPU
Chunk = tuple[int, int, int]  # of a step: the sequence, its first token, and the one after its last
Run = list[list[Chunk]]  # the steps that compute the first sequence, whose tokens are the last ones of each step
BLOCK = 16  # tokens per block
# Numbers of tokens in the proof: of the sequence that is computed beside the first one, of the first one's chunks, and
# of a chunk beside one of its decodes. Together they cover each range of rows for which products have a tile of their
# own, see skinny.UNIFORM, and decodes alone, among few tokens and among many.
OTHERS = 240
CHUNKS = 3, 20, 90, 190
BESIDE = FEW_ROWS + 2
ALONE = 512  # of the last tokens, or all if there are fewer, that are computed as decodes in one step
FEW_STEPS = 16  # of FEW_ROWS decodes each, of the last tokens
LOGITS = 600  # rows of the head that are compared with fewer, or more


def objection(spec: ModelSpec, device: torch.device, product: Choice, attention: AttentionBackend) -> str | None:
    """Return why results depend on the batch, as far as that shows before the weights are read, or None."""
    if spec.decoder is None:
        return "transformers' code computes beside our kernels, and what it computes can depend on the batch"
    if product.is_uniform:
        if reason := on_gpu.objection(spec, device, product.kernels):
            return f"torch computes norms and gates of layers: {reason}"
        for shape in spec.mixers:
            if reason := gpu_limitation(shape, spec.dtype):
                return f"torch computes layers that keep states: {reason}"
    elif not product.invariant:
        return product.note or "torch computes the products"
    return None if attention.invariant else "the results of the attention backend depend on it"


def settle(
    model: ModelSpec,
    embedding: Linear,
    layers: Sequence[Layer],
    rotaries: Sequence[Rotary],
    inputs: LayerInputs | None = None,
    *,
    linears: Iterable[Linear],  # all of the model's, the head included
    project: Callable[[Tensor], Tensor],  # Decoder.project
) -> str | None:
    """Let our kernels compute all products, with tiles that pass the proof; return why none do, or None."""
    parts, linears = (model, embedding, layers, rotaries, inputs), list(linears)
    device = embedding.weight.device
    reason = paged_gpu.trial(model.layers, model.dtype, model.cache_dtype, device, invariant=True)
    if reason is not None:
        return reason
    for uniforms in skinny.uniforms(model.dtype, device):
        for linear in linears:
            linear.unify(uniforms, model.dtype)
        reason = on_gpu.trial(*parts, choices=choices(model), invariant=True) or proof(parts, project)
        if reason is None:
            return None
    return reason


def choices(model: ModelSpec) -> Choices:
    """Return how a layer's products are computed once they have been settled: as in on_gpu.choose, with what comes
    after them if that has no norm."""
    assert model.decoder is not None
    return skinny.ALIKE if model.decoder.norms == BEFORE else {}


@torch.inference_mode()
def proof(parts: Parts, project: Callable[[Tensor], Tensor]) -> str | None:
    """Compute tokens in several batches, by a layer of each kind and by the head; return what differs, or None."""
    try:
        for layer in _first_of_each_kind(parts):
            hidden, *divided = (torch.cat(pieces) for pieces in _runs(parts, layer))
            for found in divided:
                if reason := _difference(f"layer {layer.index}", found, hidden):
                    return reason
        hidden = torch.cat([hidden] * -(-LOGITS // len(hidden)))
        logits = project(hidden)
        for rows in (1, *CHUNKS, sum(CHUNKS)):
            if reason := _difference("the head", project(hidden[-rows:]), logits[-rows:]):
                return reason
    except Exception as problem:  # whatever Triton's compiler, the driver or an old GPU raises
        lines = (str(problem).strip().splitlines() or [""])[0]
        return f"the Triton kernels do not run on this device: {type(problem).__name__}: {lines[:200]}"
    return None


def _first_of_each_kind(parts: Parts) -> list[Layer]:
    """Return a layer for each kind of attention and of quantized weights."""
    model, _, layers, *_ = parts
    found: dict[object, Layer] = {}
    for layer in layers:
        linears = dict.fromkeys(linear for _, linear, *_ in layer.parts())
        forms = tuple(None if each.quantized is None else each.quantized.forms for each in linears)
        attention = None if layer.mixer is not None else model.layers[layer.cache]
        found.setdefault((attention, layer.shape, layer.turn, forms), layer)
    return list(found.values())


def _runs(parts: Parts, layer: Layer) -> Iterator[list[Tensor]]:
    """Yield the hidden states of one sequence after a layer, in pieces: as one chunk, beside another sequence, and as
    several steps."""
    model, embedding, layers, rotaries, inputs = parts
    device = embedding.weight.device
    runs = _divided(max(gpu_plan.SPLIT * 5 // 4, sum(CHUNKS)) + 6)  # more than a part, and no multiple of a tile
    ends = [max(end for steps in runs for step in steps for own, _, end in step if own == each) for each in range(2)]
    blocks = _blocks(0, ends[0]), _blocks(-(-ends[0] // BLOCK), ends[1])
    owners = [] if layer.shape.shares is None else [layers[layer.shape.shares]]  # of the keys that it attends to
    executor = on_gpu.OnGPU(model, embedding, [*owners, layer], rotaries, inputs, choices=choices(model))

    def run(steps: Run) -> list[Tensor]:
        cache = KVCache.allocate(
            PagedGPU(invariant=True),
            [model.layers[0 if layer.mixer is not None else layer.cache]],
            num_blocks=sum(map(len, blocks)),
            block_size=BLOCK,
            dtype=model.cache_dtype,
            device=device,
            sinks=on_gpu.sinks_of([layer]),
        )
        cache.layers *= layer.cache + 1  # where the layer looks for its own
        kept, pieces = on_gpu.first_states(model, [layer], count=len(blocks)), []
        for chunks in steps:
            positions = torch.cat([torch.arange(first, last, device=device) for _, first, last in chunks])
            rows = [(blocks[sequence], first, last - first) for sequence, first, last in chunks]
            plan = cache.plan(AttentionMeta.of(rows, BLOCK, device))
            states = States(kept, _segments(chunks, device))
            ids = (7 * positions + 3) % model.vocab_size
            hidden = executor.run(Forward(ids, positions, plan, cache, positions, states))
            own = sum(last - first for sequence, first, last in chunks if sequence == 0)
            pieces.append(hidden[len(hidden) - own :])
        return pieces

    yield from map(run, runs)


def _segments(chunks: list[Chunk], device: torch.device) -> Segments:
    """Return the segments of a step: a state has one row, so chunks of one sequence, which follow each other, are one
    segment."""
    rows = []
    for sequence, own in itertools.groupby(chunks, lambda chunk: chunk[0]):
        pieces = list(own)
        first, last = pieces[0][1], pieces[-1][2]
        rows.append([(last - first, sequence if first else -1, sequence)])
    return Segments.of(rows, device)


def _divided(length: int) -> list[Run]:
    """Return the runs of the proof for a sequence of this length."""
    ends, last, alone = list(itertools.accumulate(CHUNKS)), length - 1, min(ALONE, length)
    few = min(FEW_STEPS * FEW_ROWS, length - 1)
    return [
        [[(0, 0, length)]],
        [[(1, 0, OTHERS), (0, 0, length)]],
        [
            [(1, 0, OTHERS), (0, 0, ends[0])],
            *([(0, first, end)] for first, end in itertools.pairwise(ends)),
            [(1, OTHERS, OTHERS + 1), (0, ends[-1], last - 2)],
            [(1, OTHERS + 1, OTHERS + 1 + BESIDE), (0, last - 2, last - 1)],
            [(0, last - 1, last)],
            [(1, OTHERS + 1 + BESIDE, OTHERS + 2 + BESIDE), (0, last, length)],
        ],
        # A rare difference needs many numbers to be seen: of attention in bfloat16 one in 100,000, if only its sums of
        # weights had another order. So there are many decodes in steps of few, and as many as possible in one step.
        [
            [(0, 0, length - few)],
            *(
                [(0, at, at + 1) for at in range(first, min(first + FEW_ROWS, length))]
                for first in range(length - few, length, FEW_ROWS)
            ),
        ],
        [
            *([[(0, 0, length - alone)]] if alone < length else []),
            [(0, at, at + 1) for at in range(length - alone, length)],
        ],
    ]


def _blocks(first: int, tokens: int) -> list[int]:
    return list(range(first, first - (-tokens // BLOCK)))


def _difference(what: str, found: Tensor, want: Tensor) -> str | None:
    """Return how many numbers have other bits, or None."""
    bits = torch.int16 if found.itemsize == 2 else torch.int32
    count = int((found.contiguous().view(bits) != want.contiguous().view(bits)).sum())
    return f"{count} of {found.numel()} numbers of {what} depend on the batch on this device" if count else None
