"""The number of bits of each weight of a quantized model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..quantized.config import Weights

# Bits of the layers' weights and of the head's. With int4 the head has 8 bits: with 4 it alone doubled the distance
# from the unquantized model.
BITS = {"int8": (8, 8), "int4": (4, 8)}
PART = 8  # the first and the last layers: one eighth of all layers each
STEP = 3  # every third of the layers between them
SMALL = 400_000_000  # numbers of a model: with fewer, layers have 5 bits instead of 4


class LayerBits(NamedTuple):
    """Bits of the weights of a layer: of its value projection, of its down projection and of the others."""

    value: int
    down: int
    others: int
    grouped: bool = False  # see is_grouped


def head_bits(quantization: str) -> int | None:
    """Return the bits of the head's weight; None: it is not quantized."""
    return BITS[quantization][1] if quantization in BITS else None


def is_grouped(quantization: str, num_params: int) -> bool:
    """Return whether weights of 8 bits have a scale for each group of a row on a CPU, as those of fewer bits have.

    So have the small models of int4. Activations are then rounded in groups of the same size: in those of 128 numbers
    that rows with one scale have, the head's alone raised the perplexity of SmolLM2-135M by 0.3 %.
    """
    return quantization in BITS and BITS[quantization][0] < 8 and num_params < SMALL


def layer_bits(quantization: str, layer: int, num_layers: int, num_params: int) -> LayerBits | None:
    """Return the bits of a layer's weights; None: they are not quantized. `num_params`: the numbers of the model.

    With int4 the value projections have 8 bits: in SmolLM2-135M they are 3 % of the numbers and cause a quarter of the
    error. So have the down projections of the first and the last eighth of the layers and of every third layer between
    them. A few of these cause nearly all of the error of down projections, mostly near the ends. llama.cpp's Q4_K_M
    gives more bits to the same weights. In a small model, which loses most by rounding and whose embeddings are a large
    part of its size, the first and the last eighth of the layers have 8 bits, and the others 5 but for their values:
    those few layers cause two fifths of the error.
    """
    if quantization not in BITS:
        return None
    bits, _ = BITS[quantization]
    if bits != 4:
        return LayerBits(bits, bits, bits)
    first, last = num_layers // PART, (PART - 1) * num_layers // PART
    is_end = layer < first or layer >= last
    if num_params < SMALL:
        rest = 8 if is_end else 5
        return LayerBits(value=8, down=rest, others=rest, grouped=is_grouped(quantization, num_params))
    in_8 = is_end or (layer - first) % STEP == STEP - 1
    return LayerBits(value=8, down=8 if in_8 else bits, others=bits)


def weighs_columns(quantization: str) -> bool:
    """Return whether the layers' weights are rounded by the importance of their columns, see importance.py."""
    return quantization in BITS and BITS[quantization][0] < 8


def rounded_shapes(
    quantization: str,
    head: tuple[int, int],
    values: Sequence[int],
    layers: Iterable[Sequence[Weights]],
    num_params: int,
) -> list[tuple[int, int, int]]:
    """Return the rows, columns and bits of the weights that `quantization` rounds while they are loaded.

    `head`: its rows and columns; `values`: the rows of the value projection of each layer; `layers`: their
    linear layers; `num_params`: the numbers of the model.
    """
    bits_of_head = head_bits(quantization)
    if bits_of_head is None:
        return []
    shapes, found = [(*head, bits_of_head)], list(layers)
    for index, ((_, qkv, hidden), *others) in enumerate(found):
        bits = layer_bits(quantization, index, len(found), num_params)
        assert bits is not None
        shapes += [(sum(qkv) - values[index], hidden, bits.others), (values[index], hidden, bits.value)]
        # Output, then gate and up before each down, and last the projection of queries from their latent
        for number, (_, rows, columns) in enumerate(others):
            is_down = number > 0 and number % 2 == 0
            shapes.append((sum(rows), columns, bits.down if is_down else bits.others))
    return [shape for shape in shapes if shape[0]]  # a layer may have no values of its own
