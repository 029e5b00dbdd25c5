"""Products and attention by the processor's tiles, emulated where it has none: their bits, the trial and the choice.

test_cpu_attention.py has more of attention.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import ConfigError, EngineConfig
from engine.attention import AttentionLayer, AttentionMeta
from engine.attention.cpu import Paged
from engine.build import build as build_engine
from engine.kernels import build, library
from engine.kernels.library import AMX, DOT_PAYS, ISAS, TILES_PAY, TILES_REFUSED, VNNI, Kernels, choose
from engine.kernels.matmul import Packed, Quantized
from tests.engine.test_exact import serve
from tests.engine.test_kernels import CPU, drawn, kernels, needs_library, processor
from tests.models import make

__all__ = ["processor"]

pytestmark = [needs_library, pytest.mark.usefixtures("same_threads_after")]

ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 300)
STEP = 32  # numbers of a row that one tile holds
LEAST = 2.0**-126
# Exponents of x and of the weight, as stored, between which the cases below draw numbers.
EXPONENTS = {
    "ordinary": (120, 134, 120, 134),
    "cancelling": (126, 128, 126, 128),
    "tiny results": (58, 70, 58, 70),
    "subnormal": (0, 1, 100, 254),
    "huge results": (184, 196, 184, 196),
    "anything": (0, 255, 0, 255),
}


@pytest.fixture
def amx() -> Kernels:
    return kernels("amx")


@pytest.fixture
def fault(amx) -> Iterator[ctypes.c_int32]:
    fault = ctypes.c_int32.in_dll(amx.library, "trial_fault_amx")
    yield fault
    fault.value = 0


def random_bf16(shape: tuple[int, int], low: int, high: int) -> Tensor:
    """Return numbers whose exponents, as stored, are between these; 255 makes infinities and NaN."""
    sign, mantissa = torch.randint(2, shape) << 15, torch.randint(128, shape)
    bits = sign | torch.randint(low, high + 1, shape) << 7 | mantissa
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16)


def rounded(exact: np.ndarray) -> np.ndarray:
    """Round doubles to float32. What is below 2^-126 after rounding with unlimited exponents becomes zero."""
    size = np.abs(exact)
    small = np.where(size >= LEAST - 2.0**-151, LEAST, 0.0)
    return np.where(size >= LEAST, exact, np.where(np.isnan(size), exact, np.copysign(small, exact))).astype(np.float32)


def tile_products(x: Tensor, weight: Tensor) -> np.ndarray:
    """Return x @ weight.T as Intel's manual defines TDPBF16PS, [rows, outputs] float32: a tile at a time, in doubles.

    A product of two bfloat16 is exact in a double, and so is what rounding its sum with a float needs.
    """
    padded = [
        torch.nn.functional.pad(each.float(), (0, -each.shape[1] % STEP)).double().numpy() for each in (x, weight)
    ]
    a, b = (np.where(np.abs(each) < LEAST, 0.0, each) for each in padded)
    sums = np.zeros((len(a), len(b)), np.float32)
    for start in range(0, a.shape[1], STEP):
        chains = [np.zeros_like(sums), np.zeros_like(sums)]
        for k in range(start, start + STEP):
            exact = a[:, k, None] * b[None, :, k] + chains[k % 2].astype(np.float64)
            chains[k % 2] = rounded(exact)
        both = rounded(chains[0].astype(np.float64) + chains[1].astype(np.float64))
        sums = rounded(sums.astype(np.float64) + both.astype(np.float64))
    return sums


def bits(y: Tensor) -> list[int]:
    """Return the bits of float32 numbers, with one NaN for all."""
    return torch.where(y.isnan(), torch.tensor(float("nan")), y).view(torch.int32).flatten().tolist()


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", EXPONENTS)
def test_sums_are_those_of_the_manual(amx, kind):
    a_low, a_high, b_low, b_high = EXPONENTS[kind]
    for columns in (1, 32, 63, 160):
        x, weight = random_bf16((20, columns), a_low, a_high), random_bf16((37, columns), b_low, b_high)
        got = Packed(amx, weight, wide=True)(x)
        assert bits(got) == bits(torch.from_numpy(tile_products(x, weight))), columns


@pytest.mark.parametrize("shape", [(2, 1), (36, 31), (32, 64), (100, 130), (64, 400)])
def test_int8_products_have_the_bits_of_avx512(amx, dtype, shape):
    weight, bias = drawn(*shape, dtype=dtype), drawn(shape[0], dtype=dtype)
    weight[:, 0] *= 100  # a column far larger than the others
    pairs = []
    for options in ({"wide": True}, {"bias": bias}, {"bias": bias, "gated": True}):
        pairs.append([Quantized(each, weight, bits=8, **options) for each in (amx, Kernels(amx.library, "avx512"))])
    for rows in ROWS:
        x = drawn(rows, shape[1], dtype=dtype) * 10 ** torch.randn(rows, 1).to(dtype)
        x[rows // 2, :] = float("nan") if rows % 3 == 0 else 0.0
        for own, other in pairs:
            residual = None if own.result != dtype else drawn(rows, own.outputs, dtype=dtype)
            assert bits(own(x, residual).float()) == bits(other(x, residual).float()), rows


@pytest.mark.parametrize("bits_of", [None, 8])
def test_bits_do_not_depend_on_the_helpers_that_join(amx, bits_of):
    weight, x = drawn(600, 300, dtype=torch.bfloat16), drawn(700, 300, dtype=torch.bfloat16)
    packed = Packed(amx, weight) if bits_of is None else Quantized(amx, weight, bits=bits_of)
    torch.set_num_threads(1)
    want = [packed(x[:rows]) for rows in (1, 40, 700)]
    joining = ctypes.c_int32.in_dll(amx.library, "pequod_joining")
    try:
        for joining.value in (0, 1, 2):  # those that can, none, all
            torch.set_num_threads(3)
            got = [packed(x[:rows]) for rows in (1, 40, 700)]
            assert all(map(torch.equal, got, want))
    finally:
        joining.value = 0


def test_a_forked_process_multiplies_too(amx):
    weight, x = drawn(64, 96, dtype=torch.bfloat16), drawn(20, 96, dtype=torch.bfloat16)
    packed = Packed(amx, weight)
    want, child = packed(x), os.fork()
    if child == 0:
        os._exit(0 if torch.equal(packed(x), want) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_numbers_beyond_the_last_column_do_not_count(amx):
    """Memory after a weight and after x may hold NaN."""
    x = torch.full((40, 33), float("nan")).bfloat16()
    x[:20] = drawn(20, 33, dtype=torch.bfloat16)
    packed = Packed(amx, drawn(64, 33, dtype=torch.bfloat16))
    want = packed(x[:20].clone())
    longer = torch.full((2 * packed.panels.numel(),), -1, dtype=torch.int32)  # pairs of NaN
    longer[: packed.panels.numel()] = packed.panels.flatten()
    packed._matrix.panels = longer.data_ptr()
    assert not want.isnan().any() and torch.equal(packed(x[:20]), want)


@pytest.mark.parametrize("rows", [1, 16, 17, 40, 600])
def test_columns_in_another_order(amx, rows):
    weight, x = drawn(50, 70, dtype=torch.bfloat16), drawn(rows, 70, dtype=torch.bfloat16)
    order = torch.randperm(70).int()
    packed = Packed(amx, weight[:, order.long()])
    packed._matrix.order = order.data_ptr()
    assert torch.equal(packed(x), Packed(amx, weight[:, order.long()])(x[:, order.long()]))


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 9, 40])
def test_attention_adds_values_in_the_order_of_tiles(amx, rows):
    """Keys of zeros give each value the same weight, a power of two. The exact sum of the values is zero, so that the
    result is what one order of sums rounds."""
    keys, dim = 512, 48
    half = random_bf16((keys // 2, dim), 110, 134)
    v = torch.cat([half, -half])[torch.randperm(keys)]
    want = tile_products(torch.ones(1, keys).bfloat16(), v.T.contiguous()) / keys
    paged, layer = Paged(amx.library, "amx"), AttentionLayer(2, 1, dim, dim, scale=1.0)
    cache = paged.allocate(layer, keys // 16, 16, torch.bfloat16, CPU)
    blocks, new = list(range(keys // 16)), torch.zeros(keys, 1, dim).bfloat16()
    for start, end in ((0, keys - rows), (keys - rows, keys)):
        plan = paged.plan(AttentionMeta.of([(blocks, start, end - start)], 16))
        q = torch.zeros(end - start, 2, dim).bfloat16()
        out = paged.attend(cache, q, new[start:end], v[start:end, None], plan)
    assert torch.equal(out[-1], torch.from_numpy(want).bfloat16().expand(2, dim))


# -- a whole model ----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch, amx):
    """Make the engine choose tiles, emulated if the processor has none."""
    features = library.load(build.library())[1] | ISAS["amx"] | TILES_PAY
    monkeypatch.setattr(library, "load", lambda path: (amx.library, features))


@pytest.mark.parametrize(
    ("dtype", "quantization", "packing"),
    [("bfloat16", "none", "none"), ("bfloat16", "none", "lossless"), ("float32", "int8", "none")],
)
async def test_a_model_is_exact_with_tiles(tmp_path, machine, dtype, quantization, packing):
    folder = make("qwen3", tmp_path, dtype=getattr(torch, dtype))
    base = {"model": str(folder), "device": "cpu", "dtype": dtype, "num_blocks": 64, "max_seqs": 8}
    base |= {"quantization": quantization, "weight_packing": packing}
    alone, exact, _ = await serve(EngineConfig(**base, prefix_caching=False, threads=1), together=False)
    assert exact and all(len(tokens) == 12 for tokens, _ in alone)
    for settings in ({"threads": 2}, {"max_batched_tokens": 9, "threads": 2}):
        found, _, _ = await serve(EngineConfig(**{**base, **settings}), together=True)
        assert found == alone


def test_the_resolved_config_keeps_the_variant(tmp_path, machine):
    _, info, resolved = build_engine(EngineConfig(model=str(make("qwen3", tmp_path)), device="cpu", dtype="bfloat16"))
    assert (info.product, info.product_note, info.exact) == ("amx", "", True)
    assert (resolved.cpu_isa, resolved.products) == ("amx", "amx")


# -- the trial --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [1, 3], ids=["product", "attention"])
def test_a_trial_compares_tiles_with_their_emulation(amx, fault, wrong):
    assert amx.library.trial_amx() == 0
    fault.value = wrong
    assert amx.library.trial_amx() == 2
    fault.value = 0
    assert amx.library.trial_amx() == 0


def test_an_illegal_instruction_in_the_trial_does_not_end_the_process(amx, fault):
    fault.value = 2
    assert amx.library.trial_amx() == 2


def test_speeds_are_compared(amx):
    assert amx.library.tiles_pay_amx(amx.library.matmul_bfloat16_avx512) in (0, 1)


@pytest.mark.parametrize(
    ("failed", "pays", "more"),
    [(0, 1, ISAS["amx"] | TILES_PAY), (0, 0, ISAS["amx"]), (1, None, TILES_REFUSED), (2, None, 0)],
)
@pytest.mark.parametrize("dot_pays", [True, False])
def test_tiles_are_tried_and_measured_when_the_library_is_loaded(monkeypatch, failed, pays, more, dot_pays):
    fastest = "avx512bf16" if dot_pays else "avx512"
    features = AMX | VNNI | ISAS["avx512bf16"] | ISAS["avx512"] | ISAS["avx2"]

    def compared(function: str) -> int:
        assert function == fastest and pays is not None
        return pays

    fake = SimpleNamespace(
        pequod_features=lambda: features,
        dot_pays_avx512bf16=lambda: dot_pays,
        trial_amx=lambda: failed,
        tiles_pay_amx=compared,
        matmul_bfloat16_avx512="avx512",
        matmul_bfloat16_avx512bf16="avx512bf16",
    )
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: fake)
    monkeypatch.setattr(library.structures, "check", lambda found: None)
    want = features | more | (DOT_PAYS if dot_pays else 0)
    assert library.load.__wrapped__(Path("library.so")) == (fake, want)
    usable = [isa for isa in library.best_first(want) if isa != "avx2"]
    others = [fastest, *({"avx512", "avx512bf16"} - {fastest})]
    assert usable == (["amx", *others] if pays else others + ["amx"] * (failed == 0))


def test_tiles_are_not_tried_without_vnni(monkeypatch):
    features = AMX | ISAS["avx512"]  # no instruction to emulate products of bytes with
    fake = SimpleNamespace(pequod_features=lambda: features)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: fake)
    monkeypatch.setattr(library.structures, "check", lambda found: None)
    assert library.load.__wrapped__(Path("library.so")) == (fake, features)


# -- the choice -------------------------------------------------------------------------------------------------------


def test_tiles_are_chosen_where_they_are_fastest(processor):
    processor("avx2", "avx512", "avx512bf16", "vnni", "tiles", "amx", "fast tiles")
    assert library.available() == ["amx", "avx512", "avx512bf16", "avx2"]
    for dtype in (torch.bfloat16, torch.float32):
        choice = choose("auto", CPU, dtype)
        assert (choice.name, choice.invariant, choice.note, choice.fix) == ("amx", True, "", "")
    assert choose("avx512", CPU, torch.bfloat16).name == "avx512"
    sampling = library.for_sampling("auto", CPU, torch.bfloat16)
    assert sampling is not None and sampling.isa == "avx512", "its kernels have no products"
    processor("avx2", "avx512", "avx512bf16", "vnni", "tiles", "amx")
    assert choose("auto", CPU, torch.bfloat16).name == "avx512"
    assert choose("amx", CPU, torch.bfloat16).name == "amx", "who asks for it gets it"


@pytest.mark.parametrize(("more", "why"), [(["refused"], "the system refuses"), ([], "it failed a trial")])
def test_a_note_says_why_tiles_are_not_used(processor, more, why):
    processor("avx2", "avx512", "avx512bf16", "fast dot", "vnni", "tiles", *more)
    for quantized in (False, True):
        choice = choose("auto", CPU, torch.bfloat16, quantized=quantized)
        assert (choice.name, choice.invariant) == ("avx512bf16", True)
        assert why in choice.note and "slower than AMX" in choice.note and "`cpu_isa`" in choice.fix
    assert choose("avx512bf16", CPU, torch.bfloat16).note == "", "it was asked for"
    assert choose("auto", CPU, torch.float32).note == "", "tiles have no float32"
    with pytest.raises(ConfigError, match=f"this processor cannot run amx \\({why}.*\\); it can run avx512bf16"):
        choose("amx", CPU, torch.bfloat16)


def test_other_variants_do_not_change(amx):
    """What is no product of bfloat16 or int8, nor attention over bfloat16, is the function of avx512."""
    base = Kernels(amx.library, "avx512")
    same = [amx.best, amx.layers[torch.bfloat16, torch.int8], amx.multiply_codes[torch.float32]]
    assert [each.__name__ for each in same] == [
        each.__name__
        for each in (base.best, base.layers[torch.bfloat16, torch.int8], base.multiply_codes[torch.float32])
    ]
    assert amx.multiply[torch.bfloat16].__name__ == "matmul_bfloat16_amx"
    attention = {key[1]: each.__name__ for key, each in Paged(amx.library, "amx")._attend.items()}
    assert attention == {
        torch.float32: "attend_float32_avx512",
        torch.bfloat16: "attend_bfloat16_amx",
        torch.int8: "attend_bfloat16_int8_avx512",
    }
