"""Compile the Triton kernels for a GPU, without one, and print what each takes, as JSON lines.

python -m tests.engine.gpu_resources --arch 90
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.attention.gpu_cache import Shape, near_lines, padded, power_of_two, tile_rows, tile_widths, warps
from engine.attention.gpu_plan import FEW_ROWS
from engine.attention.gpu_shapes import attend_shape, is_short, queries_of
from engine.attention.layer import LARGEST, AttentionLayer
from engine.kernels.gpu import (
    attention,
    changes,
    delta,
    experts,
    heads,
    latents,
    layers,
    logits,
    mamba2,
    matmul,
    segments,
    short_conv,
    shortlist,
    skinny,
    storing,
)
from engine.kernels.gpu import scaled as scaled_kernels
from engine.kernels.gpu import single as single_kernels
from engine.models.families.latent_shapes import MAX_RANK, LatentShape
from engine.models.gpu import delta as gpu_delta
from engine.models.gpu import experts as gpu_experts
from engine.models.gpu import heads as gpu_heads
from engine.models.gpu import latent as gpu_latent
from engine.models.gpu import mamba2 as gpu_mamba2
from engine.models.gpu import scaled, single
from engine.models.gpu import short_conv as gpu_short_conv
from engine.models.gpu import skinny as few_rows
from engine.models.gpu import tiles as gpu_tiles
from engine.models.gpu import weights as gpu_weights
from engine.models.gpu.executor import MAX_HIDDEN
from engine.models.gpu.form import ROUNDED, Form
from engine.models.gpu.gates import gate_constants
from engine.models.gpu.layers import GATE_TILE
from engine.models.gpu.scaled import Narrow
from engine.models.gpu.single import SINGLES, Row, Single
from engine.models.gpu.tiles import Tile
from engine.models.gpu.weights import DEQUANTIZED_ROWS, DEQUANTIZED_WARPS, LOOKED_UP
from engine.models.mixers.states import ConvShape, LinearShape, Mamba2Shape, MixerShape
from engine.runner.triton_logits import COUNT_DIGITS, ENTRIES, GROUP, SUM_DIGITS, TILE, TILES, WARPS

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
# Strides of blocks and tokens and sizes of weights are multiples of 16 for the models below, as the launcher finds when
# it runs.
ALIGNED = re.compile(r".*_(ptr|token|head|block)$|(rows|columns)$")


def layer(heads: int, kv_heads: int, dim: int, **more: Any) -> AttentionLayer:
    return AttentionLayer(heads, kv_heads, dim, dim, scale=1.0, **more)


LAYERS = {
    "Qwen3 0.6B": layer(16, 8, 128),
    "Llama 8B": layer(32, 8, 128),
    "Gemma 3 with a window": layer(8, 4, 256, window=1024, softcap=50.0),
    "gpt-oss": layer(64, 8, 64, window=128, sinks="sinks"),
    "Phi-3": layer(32, 32, 96),
    "Gemma 4": layer(16, 2, 512),
    "wide": layer(16, 1, 512),
    "wide, 20 heads": layer(20, 1, 512),
    "wide, 32 heads": layer(32, 1, 512),
    "DeepSeek V2 Lite": AttentionLayer(16, 1, 576, 512, scale=1.0, values_in_keys=True),
    "GLM 4.7 Flash": AttentionLayer(20, 1, 576, 512, scale=1.0, values_in_keys=True),
    "DeepSeek V3": AttentionLayer(128, 1, 576, 512, scale=1.0, values_in_keys=True),
}
# Other rotations of the heads of Llama 8B: what they have that its own do not.
TURNS = {
    "nothing": {"TURNED": 0, "NORM": False},
    "three quarters": {"TURNED": 96, "PERIOD": 8192},
    "half, alternating": {"TURNED": 64, "INTERLEAVED": True, "WIDE_TURN": True},
    "everything, before the norms": {"TURN_FIRST": True},
    "a quarter, gated": {"TURNED": 32, "GATED": True},
}
# Numbers of a hidden state, and of the MLP's.
SIZES = {"Qwen3 0.6B": (1024, 3072), "Llama 8B": (4096, 14336), "Phi-3": (3072, 8192), "largest": (MAX_HIDDEN, 1)}
VOCABULARIES = {"Qwen3": 151936, "GPT-2": 50257}
EXPERTS = {"Qwen3 30B": (2048, 128, 8), "gpt-oss": (2880, 32, 4)}  # hidden size, experts, and those of a token
LINEAR = {
    "Qwen3.5 9B": LinearShape(16, 32, 128, 128, 4),
    "heads of 64": LinearShape(4, 4, 64, 64, 4),
    "heads of 48 and 80": LinearShape(2, 4, 48, 80, 3),
    "heads of 256": LinearShape(4, 8, 256, 256, 4),
    "heads of 8 and 12": LinearShape(2, 4, 8, 12, 4),
}


def mamba(*sizes: int) -> Mamba2Shape:
    return Mamba2Shape(*sizes, has_bias=False, has_conv_bias=True, limits=(0.0, 1.0))


MIXERS: dict[str, MixerShape] = {
    **LINEAR,
    "LFM2 1.2B": ConvShape(2048, 3, has_bias=False),
    "conv of 24": ConvShape(24, 4, has_bias=True),
    "Granite 4.0 H Micro": mamba(1, 64, 128, 64, 4),
    "Granite 4.0 H Small": mamba(1, 128, 128, 64, 4),
    "Nemotron Nano 9B v2": mamba(8, 128, 128, 80, 4),
    "Mamba2 of heads of 256": mamba(1, 64, 256, 256, 4),
    "Mamba2 of heads of 8 and 16": mamba(2, 8, 8, 16, 3),
}
LATENTS = {
    "DeepSeek V2 Lite": LatentShape(heads=16, query_rank=0, rank=512, plain=128, rotated=64, value=128),
    "DeepSeek V3": LatentShape(heads=128, query_rank=1536, rank=512, plain=128, rotated=64, value=128),
    "GLM 4.7 Flash": LatentShape(heads=20, query_rank=768, rank=512, plain=192, rotated=64, value=256),
    "latents of odd sizes": LatentShape(heads=3, query_rank=MAX_RANK, rank=40, plain=12, rotated=6, value=20),
}
Arguments = tuple[dict[str, Any], dict[str, Any]]  # types and constants
PARTED = {"sums_ptr": "*fp32", "arrived_ptr": "*i32"}
ROUTED = {"pairs_ptr": "*i32", "owners_ptr": "*i32", "places_ptr": "*i64"}
FUSED = (
    attention.attend,
    delta.convolve,
    delta.finish,
    delta.recur,
    experts.choose,
    experts.combine,
    heads.multiply,
    layers.add_norm,
    layers.gate,
    mamba2.convolve_steps,
    mamba2.finish_groups,
    mamba2.scan,
    matmul.multiply,
    short_conv.convolve_gated,
    short_conv.keep_windows,
    single_kernels.multiply,
    single_kernels.multiply_quantized,
    skinny.multiply,
)  # multiplications and additions


LARGE = (90, 100, 103)  # see paged_gpu.has_large_memory


def attend(
    layer: AttentionLayer, dtype: torch.dtype, cache: torch.dtype, *, kind: str, arch: int
) -> tuple[Arguments, Shape]:
    """Return the types of the arguments and the constants of a launch, as PagedGPU makes it, and how it computes."""
    uniform, is_scaled, is_large = kind.startswith("uniform"), cache in LARGEST, arch in LARGE
    is_decode = "decode" in kind
    queries = 1 if is_decode else queries_of(layer, dtype, uniform=uniform, is_large=is_large)
    tokens = 1 if kind.endswith("of few") else FEW_ROWS + 1
    traits = {"uniform": uniform, "is_scaled": is_scaled, "is_large": is_large}
    shape = attend_shape(layer, dtype, queries, tokens, is_chunk=not is_decode, **traits)
    types = {
        "q_ptr": dtype, "cache_ptr": cache, "scales_ptr": torch.float32 if cache in LARGEST else cache,
        "out_ptr": dtype,
    }  # fmt: skip
    signature = {name: "*" + NAMES[each] for name, each in types.items()}
    signature |= dict.fromkeys(("table_ptr", "work_ptr", "starts_ptr", "lengths_ptr", "arrived_ptr"), "*i32")
    signature |= dict.fromkeys(("sums_ptr", "weights_ptr", "sinks_ptr"), "*fp32")
    signature |= {"scale": "fp32", "softcap": "fp32"}
    constants = {
        "HEADS": layer.num_heads, "KV_HEADS": layer.num_kv_heads, "SHARING": shape.sharing, **tile_widths(layer),
        "BLOCK": 16, "QUERIES": queries,
        "ROWS": tile_rows(layer, queries, shape.sharing), "PARTED": is_decode, "TILE": shape.keys, "UNIFORM": uniform,
        "SKIP": shape.skips,
        "WINDOW": layer.window or 0, "SOFTCAP": layer.softcap is not None, "SINKS": layer.sinks is not None,
        "SCALED": is_scaled, "WIDEN": False, "DEPENDENT": arch >= 90,
        "NEAR": near_lines(layer, 16) if shape.is_early and not is_scaled else 0,
    }  # fmt: skip
    return (signature, constants), shape


def latent(
    shape: LatentShape, dtype: torch.dtype, *, arch: int
) -> Iterator[tuple[str, Any, Arguments, int | dict[str, int]]]:
    """Yield what latent attention computes beside attention, as GPULatent launches it."""
    pointers = ("projected_ptr", "query_gain_ptr", "gain_ptr", "queries_ptr", "keys_ptr", "q_ptr", "out_ptr")
    types = dict.fromkeys((*pointers, "x_ptr", "weight_ptr"), "*" + NAMES[dtype])
    types |= {"positions_ptr": "*i64", "angles_ptr": "*fp32", "query_eps": "fp32", "eps": "fp32"}
    turn = {"TURNED": True, "INTERLEAVED": True, "WIDE": False}
    for name, kernel, own in (
        ("normalize", latents.normalize, gpu_latent._norm_constants(shape) | turn),
        ("turn", latents.rotate, gpu_latent._turn_constants(shape) | turn),
    ):
        constants = {**own, "DEPENDENT": arch >= 90}
        yield name, kernel, (types, constants), constants.pop("num_warps")
    for rows, columns in ((shape.rank, shape.plain), (shape.value, shape.rank)):
        for tile in dict.fromkeys(gpu_heads.tile_of(dtype, tokens, uniform=False) for tokens in (1, 1024)):
            constants = {**gpu_heads._constants(rows, columns, tile), "WIDEN": False, "DEPENDENT": arch >= 90}
            warps_of = constants.pop("num_warps")
            yield f"heads {rows} by {columns}, {tile.tokens} tokens", heads.multiply, (types, constants), warps_of


def store(layer: AttentionLayer, dtype: torch.dtype, cache: torch.dtype, *, arch: int) -> Arguments:
    signature = {"k_ptr": "*" + NAMES[dtype], "v_ptr": "*" + NAMES[dtype], "slots_ptr": "*i64"}
    signature |= {"cache_ptr": "*" + NAMES[cache], "scales_ptr": "*fp32" if cache in LARGEST else "*" + NAMES[cache]}
    constants = {
        "DIM": layer.head_dim, "V_DIM": layer.stored_v_dim, "DIM_P": padded(layer.head_dim),
        "V_DIM_P": padded(layer.v_head_dim), "BLOCK": 16, "SCALED": cache in LARGEST, "DEPENDENT": arch >= 90,
    }  # fmt: skip
    return signature, constants


def rotate_store(layer: AttentionLayer, dtype: torch.dtype, cache: torch.dtype, *, arch: int) -> Arguments:
    signature = dict.fromkeys(("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "q_scales_ptr"), "*" + NAMES[dtype])
    signature |= {"positions_ptr": "*i64", "angles_ptr": "*fp32", "slots_ptr": "*i64", "eps": "fp32"}
    signature |= {"cache_ptr": "*" + NAMES[cache], "scales_ptr": "*fp32" if cache in LARGEST else "*" + NAMES[cache]}
    constants = {
        "HEADS": layer.num_heads, "KV_HEADS": layer.num_kv_heads, "DIM": layer.head_dim,
        "GROUP_P": power_of_two(layer.num_heads // layer.num_kv_heads), "HALF_P": power_of_two(layer.head_dim // 2),
        "BLOCK": 16, "GATED": False, "OWN": 2, "NORM": True, "WIDE": False, "TURN_FIRST": False,
        "NORM_VALUES": layer.head_dim > 256, "TURNED": layer.head_dim,
        "INTERLEAVED": False, "WIDE_TURN": False, "PERIOD": 0, "SCALED": cache in LARGEST,
        "DEPENDENT": arch >= 90,
    }  # fmt: skip
    return signature, constants


def add_norm(size: int, dtype: torch.dtype, *, centered: bool, arch: int) -> Arguments:
    signature = dict.fromkeys(
        ("x_ptr", "added_ptr", "after_ptr", "scale_ptr", "weight_ptr", "normed_ptr"), "*" + NAMES[dtype]
    )
    constants = {
        "SIZE": size, "SIZE_P": power_of_two(size), "ROW": size, "ADD": True, "AFTER": True, "SCALE": True,
        "NORM": True, "WIDE": centered, "CENTERED": centered, "DEPENDENT": arch >= 90,
    }  # fmt: skip
    return signature | {"eps": "fp32"}, constants


def gate(inner: int, activation: str, dtype: torch.dtype, *, arch: int) -> Arguments:
    signature = dict.fromkeys(("gate_up_ptr", "out_ptr"), "*" + NAMES[dtype])
    constants = {"INNER": inner, "TILE": GATE_TILE, "DEPENDENT": arch >= 90}
    return signature, constants | gate_constants(activation, None)


def few(
    tile: few_rows.Tile,
    dtype: torch.dtype,
    *,
    activation: str = "",
    dependent: bool,
    add: bool = False,
    fan: int = 0,
) -> Arguments:
    """Return the types of the arguments and the constants of a launch of a product with a plain weight."""
    pointers = ("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "out_ptr")
    constants = {
        "BIAS": False, "ADD": add, "EVEN": True, "TOKENS": tile.tokens, "ROWS": tile.rows,
        "COLUMNS": tile.columns, "STAGES": tile.stages, "WIDEN": False, "DEPENDENT": dependent, "SHARED": tile.shared,
        "FAN": fan, "PARTS": tile.parts, "AHEAD": tile.ahead, "SERIAL": tile.is_serial,
        **gate_constants(activation, None),
    }  # fmt: skip
    return dict.fromkeys(pointers, "*" + NAMES[dtype]) | ROUTED | PARTED | {"scale": "fp32"}, constants


def single_products(label: str, size: Single, *, arch: int) -> Iterator[tuple[str, Any, Arguments, int]]:
    """Yield products of a single row with plain weights as single.multiply launches them."""
    pointers = ("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr", "gain_ptr", "out_ptr")
    for columns in (1024, 4096, 12288):
        for kind, activation in (("gate", "silu"), ("square", "relu2"), ("residual", "")):
            own, _ = single._plain(columns, size, activation, None, (not activation, not activation))
            constants = {name: value for name, value in own.items() if name != "num_warps"}
            constants |= {"NORM": bool(activation), "WIDE": False, "DEPENDENT": arch >= 90}
            types = dict.fromkeys(pointers, "*bf16") | {"eps": "fp32", "scale": "fp32"}
            yield f"{label}, {columns} columns, {kind}", single_kernels.multiply, (types, constants), own["num_warps"]


def row_products(
    label: str, form: Form, dtype: torch.dtype, size: Row, *, arch: int
) -> Iterator[tuple[str, Any, Arguments, dict[str, int]]]:
    """Yield products of a single row as GPUWeight launches them."""
    types = dict.fromkeys(("x_ptr", "bias_ptr", "residual_ptr", "out_ptr"), "*" + NAMES[dtype]) | {"eps": "fp32"}
    types |= {"quads_ptr": "*i64", "gains_ptr": "*i64", "words_ptr": "*i32"}
    types |= {name: weight(form, dtype)[0][name] for name in ("scales_ptr", "zeros_ptr")}
    for columns, kind in ((4096, "gate"), (4096, "square"), (4096, "residual"), (12288, "residual")):
        activation = {"gate": "silu", "square": "relu2"}.get(kind, "")
        own = single._quantized(columns, form, size, activation, not form.is_float or arch >= 89)
        options = {name: own[name] for name in ("num_warps", "maxnreg")}
        constants = {name: value for name, value in own.items() if name not in options}
        constants |= {"BIAS": not activation, "ADD": not activation, "NORM": bool(activation), "WIDE": False}
        constants |= {"DEPENDENT": arch >= 90}
        yield (
            f"{label}, {size.words} words, {size.warps} warps, {columns} columns, {kind}",
            single_kernels.multiply_quantized,
            (types, constants),
            options,
        )


def chosen(count: int, active: int, *, arch: int) -> Arguments:
    """Return the types of the arguments and the constants of the choice of experts."""
    signature = {"logits_ptr": "*fp32", "correction_ptr": "*fp32", "weights_ptr": "*fp32", "chosen_ptr": "*i32"}
    signature |= {"scales_ptr": "*bf16", "slots_ptr": "*i64"}
    constants = {
        "EXPERTS": count, "ACTIVE": active, "ACTIVE_P": power_of_two(active),
        "GROUPS": 8, "GROUPS_P": 8, "KEPT": 4, "SIZE_P": power_of_two(count // 8),
        "SIGMOID": True, "CORRECT": True, "NORMALIZE": True, "EPSILON": 1e-20, "SCALES": True, "DEPENDENT": arch >= 90,
    }  # fmt: skip
    return signature | {"scale": "fp32"}, constants


def arranged(count: int, tokens: int, *, arch: int) -> Arguments:
    signature = {"chosen_ptr": "*i32"} | ROUTED
    constants = {"EXPERTS": count, "EXPERTS_P": power_of_two(count + 1), "TOKENS": tokens}
    return signature, constants | {"TILE": gpu_experts.ARRANGE_TILE, "DEPENDENT": arch >= 90}


def gate_heads(numbers: int, dtype: torch.dtype, *, arch: int) -> Arguments:
    signature = {"seen_ptr": "*" + NAMES[dtype], "gates_ptr": "*" + NAMES[dtype]}
    constants = {"NUMBERS": numbers, "DIM": 128, "PER_HEAD": False, "SOFTPLUS": False}
    return signature, {**constants, "TILE": GATE_TILE, "DEPENDENT": arch >= 90}


def combined(hidden: int, active: int, dtype: torch.dtype, *, arch: int) -> Arguments:
    pointers = ("x_ptr", "results_ptr", "shared_ptr", "gates_ptr")
    signature = dict.fromkeys(pointers, "*" + NAMES[dtype]) | {"weights_ptr": "*fp32"}
    constants = {"SIZE": hidden, "TILE": GATE_TILE, "ACTIVE": active, "SHARED": True, "GATED": True}
    return signature, constants | {"DEPENDENT": arch >= 90}


def mixer(shape: MixerShape, dtype: torch.dtype, *, arch: int) -> Iterator[tuple[Any, Arguments, dict[str, int]]]:
    """Yield the kernels of a layer that keeps states as they are launched."""
    numbers = (
        "qkvz_ptr", "gates_ptr", "taps_ptr", "windows_ptr", "convolved_ptr", "read_ptr", "weight_ptr", "projected_ptr",
        "out_ptr",
    )  # fmt: skip
    types = dict.fromkeys(numbers, "*" + NAMES[dtype]) | dict.fromkeys(("eps", "l2_eps", "least", "most"), "fp32")
    types |= dict.fromkeys(("decay_ptr", "dt_bias_ptr", "skip_ptr", "numbers_ptr", "matrices_ptr"), "*fp32")
    types |= dict.fromkeys(segments.SEGMENTS, "*i32")
    found: tuple[Any, ...]
    if isinstance(shape, LinearShape):
        types["bias_ptr"] = "*fp32"
        found = (delta.convolve, delta.recur, delta.finish), gpu_delta._constants(shape)
    else:
        types["bias_ptr"] = types["taps_ptr"]
        if isinstance(shape, Mamba2Shape):
            found = (mamba2.convolve_steps, mamba2.scan, mamba2.finish_groups), gpu_mamba2._constants(shape)
        else:
            found = (short_conv.convolve_gated, short_conv.keep_windows), gpu_short_conv._constants(shape)
    for kernel, own in zip(*found, strict=True):
        options = {name: value for name, value in own.items() if name in ("num_warps", "maxnreg")}
        constants = {name: value for name, value in own.items() if name not in options}
        yield kernel, (types, constants | {"DEPENDENT": arch >= 90}), options


FORMS = (
    *ROUNDED.values(),
    Form(4, 128, has_zeros=True, scale=torch.float16),
    Form(8, 32, scale=torch.float16),
    Form(8, is_float=True),
    Form(8, 128, is_float=True),
)


def weight(form: Form, dtype: torch.dtype) -> Arguments:
    signature = {"numbers_ptr": "*" + NAMES[form.dtype], "out_ptr": "*" + NAMES[dtype]}
    signature |= {
        "scales_ptr": "*" + NAMES[form.scale],
        "zeros_ptr": "*" + NAMES[form.dtype if form.has_zeros else form.scale],
    }
    constants = {
        "BITS": form.bits, "FLOAT": form.is_float, "ZEROS": form.has_zeros, "SLICE": form.slice, "GROUP": form.group,
    }  # fmt: skip
    return signature, constants


def product(form: Form, dtype: torch.dtype, tile: Tile, *, arch: int, fan: int = 0, even: bool = True) -> Arguments:
    """Return the types of the arguments and the constants of a launch, as GPUWeight makes it."""
    signature, constants = weight(form, dtype)
    signature |= {"x_ptr": "*" + NAMES[dtype], "bias_ptr": "*" + NAMES[dtype]}
    signature |= {"sums_ptr": "*fp32", "arrived_ptr": "*i32"} | ROUTED
    sizes = {"TOKENS": tile.tokens, "ROWS": tile.rows, "STAGES": tile.stages}
    return signature, constants | sizes | {
        "WIDEN": False, "FAN": fan, "TOGETHER": tile.slices, "TURNED": tile.turned, "FOLD": tile.folded, "EVEN": even,
        "DEPENDENT": arch >= 90,
    }  # fmt: skip


def in_fp8(narrow: Narrow, *, is_blocked: bool, arch: int) -> Arguments:
    """Return the types of the arguments and the constants of a launch, as scaled.multiply makes it."""
    fp8, floats = ("x_ptr", "numbers_ptr"), ("x_scales_ptr", "scales_ptr", "sums_ptr")
    signature = dict.fromkeys(fp8, "*fp8e4nv") | dict.fromkeys(floats, "*fp32") | {"arrived_ptr": "*i32"}
    signature |= dict.fromkeys(("bias_ptr", "out_ptr"), "*bf16")
    return signature, {
        "BLOCKED": is_blocked, "TOKENS": narrow.tokens, "ROWS": narrow.rows, "STAGES": narrow.stages, "WIDEN": False,
        "DEPENDENT": arch >= 90,
    }  # fmt: skip


def quantized_x(*, arch: int) -> Arguments:
    signature = {"x_ptr": "*bf16", "numbers_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}
    return signature, {"TOKENS": scaled.TOKENS, "DEPENDENT": arch >= 90}


def dequantized(form: Form, dtype: torch.dtype, *, look_up: bool) -> Arguments:
    signature, constants = weight(form, dtype)
    ids = {"ids_ptr": "*i64" if look_up else "*i32"}
    rows = LOOKED_UP if look_up else DEQUANTIZED_ROWS
    return signature | ids, constants | {"ROWS": rows, "LOOK_UP": look_up}


LOGITS = {
    "x_ptr": "*fp32", "rows_ptr": "*i64", "state_ptr": "*i64", "counts_ptr": "*i32", "sums_ptr": "*i64",
    "weights_ptr": "*fp32", "parts_ptr": "*i64", "tops_ptr": "*fp32", "ids_ptr": "*i64", "values_ptr": "*fp32",
    "maxima_ptr": "*i32", "keys_ptr": "*i32", "tokens_ptr": "*i64",
    "at_ptr": "*i64", "penalties_ptr": "*fp32", "biases_ptr": "*fp32", "chosen_ptr": "*i64", "bits_ptr": "*i32",
}  # fmt: skip


def sampling(vocab_size: int, arch: int) -> Iterator[tuple[Any, Arguments]]:
    """Yield each kernel for logits with the arguments that TritonLogits gives it."""
    tiles = {"SIZE": vocab_size, "TILE": TILE, "TILES": TILES, "DEPENDENT": arch >= 90}
    parts = {"PARTS": -(-vocab_size // (TILE * TILES)), **tiles}
    over = {"PARTS_P": power_of_two(parts["PARTS"]), **parts}
    for group in (0, GROUP):
        yield logits.find_top, (LOGITS, {"GROUP": group, **tiles})
    groups, live = parts["PARTS"] * TILES * TILE // GROUP, -(-vocab_size // GROUP)
    bound = {"GROUPS": groups, "LIVE": live, "LIVE_P": power_of_two(live), "DEPENDENT": arch >= 90}
    yield shortlist.find_bound, (LOGITS, bound)
    yield shortlist.shortlist, ({**LOGITS, "ids_ptr": "*i32"}, {"GROUP": GROUP, **tiles})
    yield shortlist.draw_listed, ({**LOGITS, "ids_ptr": "*i32"}, {"DEPENDENT": arch >= 90})
    for known in range(COUNT_DIGITS):
        yield logits.count_digit, (LOGITS, {"KNOWN": known, **tiles})
    for known in range(1, SUM_DIGITS):
        yield logits.sum_digit, (LOGITS, {"KNOWN": known, **tiles})
    for sample in (False, True):
        yield logits.weigh, (LOGITS, {"SAMPLE": sample, **parts})
        yield logits.pick, (LOGITS, {"SAMPLE": sample, **over})
    yield logits.sum_kept, (LOGITS, parts)
    yield logits.tally, ({**LOGITS, "parts_ptr": "*i32"}, parts)
    yield logits.collect, ({**LOGITS, "parts_ptr": "*i32"}, over)
    for kernel in (changes.penalize, changes.add, changes.exclude):
        yield kernel, (LOGITS, {"TILE": ENTRIES})
    yield changes.forbid, (LOGITS, {"SIZE": vocab_size, "WORDS": -(-vocab_size // 32), "TILE": TILE})


def kernels(arch: int) -> Iterator[tuple[str, Any, Arguments, Any]]:
    """Yield (name, kernel, its arguments, and `shape` of `resources`) for the shapes and dtypes that are compiled."""
    for name, each in LAYERS.items():
        for dtype, cache in (
            (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8), (torch.bfloat16, torch.float8_e4m3fn),
            (torch.float16, torch.int8), (torch.float32, torch.float32),
        ):  # fmt: skip
            if cache == torch.float8_e4m3fn and arch < 89:
                continue  # Triton does not convert these numbers there
            label = f"{name} {NAMES[dtype]} {NAMES[cache]}"
            is_uniform = arch >= 90 and is_short(each, dtype, torch.device("cpu"), is_scaled=cache in LARGEST)
            decodes = ("uniform decode", "uniform decode of few") if is_uniform else ()
            for kind in ("decode", "decode of few", "chunk", "uniform", *decodes):
                arguments, shape = attend(each, dtype, cache, kind=kind, arch=arch)
                yield f"{kind} {label}", attention.attend, arguments, shape
            stored = store(each, dtype, cache, arch=arch)
            yield f"store {label}", storing.store, stored, warps(stored[1]["DIM_P"])
            if each.head_dim != each.v_head_dim:
                continue  # such keys are not rotated there
            arguments = rotate_store(each, dtype, cache, arch=arch)
            num_warps = warps(2 * arguments[1]["GROUP_P"] * arguments[1]["HALF_P"])
            yield f"rotate {label}", storing.rotate_store, arguments, num_warps
            for kind, constants in TURNS.items() if name == "Llama 8B" else ():
                own = arguments[0], arguments[1] | constants
                yield f"rotate {kind} of {label}", storing.rotate_store, own, num_warps
    for name, (hidden, inner) in SIZES.items():
        for dtype in (torch.bfloat16, torch.float32):
            label = f"{name} {NAMES[dtype]} {NAMES[dtype]}"
            for centered in (False, True):
                norm = add_norm(hidden, dtype, centered=centered, arch=arch)
                yield f"norm {'centered ' * centered}{label}", layers.add_norm, norm, warps(norm[1]["SIZE_P"])
            yield f"gate_heads {label}", layers.gate_heads, gate_heads(hidden, dtype, arch=arch), warps(GATE_TILE)
            for activation in ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"):
                yield (
                    f"gate {label} {activation}",
                    layers.gate,
                    gate(inner, activation, dtype, arch=arch),
                    warps(GATE_TILE),
                )
    for form in FORMS:
        for dtype in gpu_weights.DTYPES:
            label = f"{NAMES[dtype]} {form.name}"
            sizes = (gpu_tiles.candidates(rows, form) for rows in gpu_tiles.CANDIDATES)
            for size in dict.fromkeys(itertools.chain(*sizes)):
                if isinstance(size, Row):
                    yield from row_products(f"row {label}", form, dtype, size, arch=arch)
                    continue
                kind = ", turned" * size.turned + ", folded" * size.folded
                yield (
                    f"product {label}, {size.tokens} rows by {size.rows}{kind}",
                    matmul.multiply,
                    product(form, dtype, size, arch=arch),
                    size.warps,
                )
            odd = gpu_tiles.UNIFORM_TILE
            yield f"odd product {label}", matmul.multiply, product(form, dtype, odd, arch=arch, even=False), odd.warps
            for look_up in (False, True):
                arguments = dequantized(form, dtype, look_up=look_up)
                warps_of = 1 if look_up else DEQUANTIZED_WARPS
                yield f"{'lookup' if look_up else 'dequantize'} {label}", matmul.dequantize, arguments, warps_of
    for size in dict.fromkeys(itertools.chain(*scaled.CANDIDATES.values())) if arch >= 89 else ():
        for is_blocked in (False, True) if isinstance(size, Narrow) else ():
            label = f"{size.tokens} rows by {size.rows}, {size.parts} parts, {'blocks' if is_blocked else 'rows'} bf16"
            yield f"scaled {label}", scaled_kernels.multiply, in_fp8(size, is_blocked=is_blocked, arch=arch), size.warps
    if arch >= 89:
        yield "quantize bf16", scaled_kernels.quantize, quantized_x(arch=arch), 4
    for size in dict.fromkeys(itertools.chain(*few_rows.IN_PARTS.values())):
        found = few(size, torch.bfloat16, add=True, dependent=arch >= 90)
        label = f"few {size.tokens} rows, tiles of {size.rows} by {size.columns}, in {size.parts} parts bf16"
        yield label, skinny.multiply, found, size.warps
    for size in SINGLES:
        yield from single_products(f"one row, {size.warps} warps, {size.numbers} numbers bf16", size, arch=arch)
    for size in dict.fromkeys(itertools.chain(*(few_rows.CANDIDATES[rows] for rows in (16, 32, 64)))):
        for kind, activation in (("gate", "silu"), ("square", "relu2"), ("residual", "")):
            found = few(size, torch.bfloat16, activation=activation, add=not activation, dependent=arch >= 90)
            label = f"few {size.tokens} rows, tiles of {size.rows} by {size.columns}, {kind} bf16"
            yield label, skinny.multiply, found, size.warps
    for dtype, candidates in ((torch.bfloat16, few_rows.UNIFORM), (torch.float32, few_rows.UNIFORM_FLOAT32)):
        chosen_from = candidates if arch >= 90 else candidates[-2:]  # see skinny.uniforms
        of_gates = dict.fromkeys(itertools.chain(*(each.gated.values() for each in chosen_from)))
        others = dict.fromkeys(size for each in chosen_from for tiles in each for size in tiles.values())
        for size, is_gate in [*((size, False) for size in others), *((size, True) for size in of_gates)]:
            if size in of_gates and not is_gate:
                continue  # of a model whose gate has a kernel of its own: it takes fewer registers
            found = few(size, dtype, activation="silu" * is_gate, add=not is_gate, dependent=arch >= 90)
            parts = f", {size.parts} parts" if size.parts > 1 else ""
            label = f"tiles of {size.tokens} by {size.rows}{', gate' * is_gate}{parts} {NAMES[dtype]}"
            yield f"alike {label}", skinny.multiply, found, size.warps
    for name, (hidden, count, active) in EXPERTS.items():
        yield f"choose {name}", experts.choose, chosen(count, active, arch=arch), warps(power_of_two(count))
        yield f"combine {name}", experts.combine, combined(hidden, active, torch.bfloat16, arch=arch), warps(GATE_TILE)
        for size in gpu_experts.TILES.values():
            yield f"arrange {name}, tiles of {size.tokens}", experts.arrange, arranged(count, size.tokens, arch=arch), 4
    for size in gpu_experts.TILES.values():
        for kind, activation, fan in (("gate", "clamped", 8), ("down", "", 1)):
            found = few(size, torch.bfloat16, activation=activation, dependent=arch >= 90, fan=fan)
            yield f"routed {kind}, tiles of {size.tokens} bf16", skinny.multiply, found, size.warps
    for form in FORMS:
        for part in gpu_experts.QUANTIZED_TILES.values():
            label = f"routed {form.name}, tiles of {part.tokens} bf16"
            yield label, matmul.multiply, product(form, torch.bfloat16, part, arch=arch, fan=4), part.warps
    for name, mixed in MIXERS.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for kernel, arguments, options in mixer(mixed, dtype, arch=arch):
                yield f"{kernel.__name__} {name} {NAMES[dtype]}", kernel, arguments, options
    for name, of_latents in LATENTS.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for kind, kernel, arguments, options in latent(of_latents, dtype, arch=arch):
                yield f"{kind} of {name} {NAMES[dtype]}", kernel, arguments, options
    for name, vocab_size in VOCABULARIES.items():
        for kernel, arguments in sampling(vocab_size, arch):
            yield f"{kernel.__name__} logits of {name}", kernel, arguments, WARPS


def resources(kernel: Any, arguments: Arguments, shape: int | Shape | dict[str, int], arch: int) -> dict[str, Any]:
    """Compile a kernel; return its registers and stack per thread, its shared memory, and its matrix instructions.
    `shape`: the warps of a program, all of Shape, or options.

    The instructions are counted in PTX, because a disassembler takes longer than most kernels do to compile.
    """
    types, constants = arguments
    signature = {name: types.get(name, "i32") if name not in constants else "constexpr" for name in kernel.arg_names}
    hints = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        if name not in constants and ALIGNED.match(name) and not kernel.params[place].do_not_specialize_on_alignment
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    options: dict[str, Any] = {"enable_fp_fusion": kernel in FUSED and not constants.get("UNIFORM")}
    if isinstance(shape, Shape):
        options |= {"num_warps": shape.warps, "num_stages": shape.stages}
    elif isinstance(shape, dict):
        options |= shape
    else:
        options["num_warps"] = shape
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),  # spilled registers are in it
        "shared": compiled.metadata.shared,
        "mma": len(re.findall(r"\bmma\.sync\.", ptx)),
        "wgmma": len(re.findall(r"\bwgmma\.mma_async\.", ptx)),
        "waits": len(re.findall(r"\bgriddepcontrol\.wait", ptx)),  # for the kernel before
        "carried": carried_bounds(compiled.asm["ttir"]),
    }


def carried_bounds(ttir: str) -> list[str]:
    """Return the bounds of loops that an iteration of a loop around them sets for the next: Triton 3.6 loses them."""
    carried = {name for each in re.findall(r"iter_args\((.*?)\) ->", ttir) for name in re.findall(r"(%\w+) =", each)}
    bounds = {name for each in re.findall(r"scf\.for %\w+ = (%\w+) to (%\w+) ", ttir) for name in each}
    return sorted(carried & bounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, as 90")
    parser.add_argument(
        "--only", nargs="*", default=[""], help="kernels in whose name one of these expressions is found"
    )
    parser.add_argument("--check", action="store_true", help="end with code 1 if a kernel needs a stack")
    args = parser.parse_args()
    spilled = False
    for name, kernel, arguments, shape in kernels(args.arch):
        if any(re.search(expression, name) for expression in args.only):
            found = resources(kernel, arguments, shape, args.arch)
            spilled |= found["stack"] > 0
            print(json.dumps({"kernel": name, **found}), flush=True)
    if args.check and spilled:
        sys.exit(1)


if __name__ == "__main__":
    main()
