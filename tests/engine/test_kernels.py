"""The packed matmul against torch in float64, the bits of its rows, and the library's selection."""

from __future__ import annotations

import ctypes
import json
import random
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import ConfigError
from engine.bench import kernels as bench
from engine.kernels import build, library, structures
from engine.kernels.library import ISAS, Kernels, choose
from engine.kernels.matmul import Packed
from engine.kernels.structures import Gate
from engine.models.squared import SQUARED

CPU = torch.device("cpu")
# Columns and rows of the weight; panels are 32 or 16 wide, steps along k one or two numbers.
SHAPES = [(1, 1), (2, 3), (31, 2), (33, 65), (64, 128), (130, 77), (300, 192), (1000, 257)]

needs_library = pytest.mark.skipif(
    build.supported() is not None or build.compiler() is None, reason="needs Linux on x86-64 and a C++ compiler"
)

pytestmark = pytest.mark.usefixtures("same_threads_after")


class Emulated(ctypes.CDLL):
    """A library in which a variant's instructions are emulated; functions that it lacks are those of the usual one."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.usual = library.load(build.library())[0]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.usual, name)


@cache
def emulated(isa: str) -> Emulated:
    loaded = Emulated(build.library(emulate=isa))
    structures.check(loaded)
    return loaded


def kernels(isa: str) -> Kernels:
    """Return a variant, emulating those of build.EMULATED if the processor lacks the instructions; skips the test if
    it cannot run."""
    loaded, features = library.load(build.library())
    is_emulated = isa in build.EMULATED and not features & ISAS[isa]
    isa_needed = build.BASES.get(isa, "avx512") if is_emulated else isa
    if not features & ISAS[isa_needed] or (isa == "amx" and not features & library.VNNI):
        pytest.skip(f"this processor cannot run {isa}")  # before the emulation is compiled, which takes a minute
    return Kernels(emulated(isa) if is_emulated else loaded, isa)


@pytest.fixture(params=build.variants("matmul"))
def variant(request) -> Kernels:
    return kernels(request.param)


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def oracle(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, gated: bool = False
) -> Tensor:
    """Return what Packed computes, in float64 with torch."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * torch.sigmoid(gate) * up
    return y if residual is None else y + residual.double()


def error(got: Tensor, want: Tensor, size: float = 1.0) -> float:
    """Return the largest difference, relative to the number or to `size`, whichever is larger."""
    return ((got.double() - want).abs() / want.abs().clamp(min=size)).max().item() if got.numel() else 0.0


# -- numbers --------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
def test_products_equal_float64(variant, dtype, shape):
    weight, bias = drawn(*shape, dtype=dtype, scale=shape[1] ** -0.5), drawn(shape[0], dtype=dtype)
    plain, biased, wide = (
        Packed(variant, weight),
        Packed(variant, weight, bias),
        Packed(variant, weight, bias, wide=True),
    )
    for rows in (1, 2, 3, 4, 6, 7, 12, 13, 29, 100, 481):
        x, residual = drawn(rows, shape[1], dtype=dtype), drawn(rows, shape[0], dtype=dtype)
        rounding = 2**-8 if dtype == torch.bfloat16 else 2**-18
        assert error(plain(x), oracle(x, weight)) < rounding
        assert error(plain(x, residual), oracle(x, weight, residual=residual)) < rounding
        assert error(biased(x, residual), oracle(x, weight, bias, residual)) < rounding
        assert wide(x).dtype == torch.float32
        assert error(wide(x), oracle(x, weight, bias)) < 2**-18


@needs_library
@pytest.mark.parametrize("shape", [(2, 1), (6, 5), (32, 64), (66, 31), (512, 192)])
def test_gated_products_equal_float64(variant, dtype, shape):
    weight, bias = drawn(*shape, dtype=dtype, scale=shape[1] ** -0.5), drawn(shape[0], dtype=dtype)
    plain, biased = Packed(variant, weight, gated=True), Packed(variant, weight, bias, gated=True)
    for rows in (1, 3, 14):
        x, residual = drawn(rows, shape[1], dtype=dtype), drawn(rows, shape[0] // 2, dtype=dtype)
        rounding = 2**-7 if dtype == torch.bfloat16 else 2**-17
        assert plain(x).shape == (rows, shape[0] // 2)
        assert error(plain(x), oracle(x, weight, gated=True)) < rounding
        assert error(biased(x, residual), oracle(x, weight, bias, residual, gated=True)) < rounding


@needs_library
@pytest.mark.parametrize("shape", [(1, 1), (6, 5), (66, 31), (512, 192)])
def test_products_without_a_gate_are_squared_above_0_with_the_same_bits_in_any_batch(variant, dtype, shape):
    weight, bias, x = drawn(*shape, dtype=dtype), drawn(shape[0], dtype=dtype), drawn(60, shape[1], dtype=dtype)
    plain, packed = Packed(variant, weight, bias, wide=True), Packed(variant, weight, bias)
    packed.finish_with(gate=Gate(SQUARED))
    whole = packed(x)
    assert torch.equal(whole, plain(x).relu().square().to(dtype))
    for first, last in ((0, 1), (7, 9), (1, 60)):
        assert torch.equal(packed(x[first:last]), whole[first:last])


@needs_library
def test_silu_at_its_edges(variant):
    gates = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, -87.5, 88.0, -90.0, 1e4, -1e4, 3e38, -3e38])
    one = Packed(variant, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), gated=True)
    got = one(torch.stack([gates, torch.ones(len(gates))], dim=1))[:, 0]
    assert error(got, torch.nn.functional.silu(gates.double()), 1e-30) < 1e-6
    assert one(torch.tensor([[float("nan"), 1.0]])).isnan().all()
    assert one(torch.tensor([[float("inf"), 1.0]])).isnan().all(), "infinity times the zeros of the weight"


@needs_library
def test_no_rows_and_wrong_tensors(variant, dtype):
    packed = Packed(variant, drawn(40, 24, dtype=dtype))
    assert packed(torch.empty(0, 24, dtype=dtype)).shape == (0, 40)
    assert packed.lookup(torch.empty(0, dtype=torch.int64)).shape == (0, 24)
    x = drawn(3, 24, dtype=dtype)
    for wrong in (x[0], x[:, :23], x.double(), x[None]):
        with pytest.raises(ValueError, match=r"not \[rows, 24\]"):
            packed(wrong)
    for residual in (drawn(2, 40, dtype=dtype), drawn(3, 39, dtype=dtype)):
        with pytest.raises(ValueError, match=r"residual|\[rows, 40\]"):
            packed(x, residual)


@needs_library
def test_noncontiguous_tensors_are_multiplied(variant, dtype):
    weight, x, residual = drawn(48, 40, dtype=dtype), drawn(9, 80, dtype=dtype), drawn(48, 9, dtype=dtype)
    got = Packed(variant, weight.t().contiguous().t())(x[:, ::2], residual.t())
    assert torch.equal(got, Packed(variant, weight)(x[:, ::2].contiguous(), residual.t().contiguous()))


@needs_library
def test_nan_stays_in_its_row_and_column(variant, dtype):
    weight, x = drawn(70, 33, dtype=dtype), drawn(30, 33, dtype=dtype)
    clean = Packed(variant, weight)(x)
    x[5, 32], x[17, 0] = float("nan"), float("inf")
    got = Packed(variant, weight)(x)
    assert got[5].isnan().all() and got[17].isinf().all()
    others = [row for row in range(30) if row not in (5, 17)]
    assert torch.equal(got[others], clean[others])
    weight[69, 1] = float("nan")
    got = Packed(variant, weight)(x[others])
    assert got[:, 69].isnan().all() and torch.equal(got[:, :69], clean[others, :69])


@needs_library
def test_huge_numbers(variant, dtype):
    weight, x = torch.full((40, 50), 1e30).to(dtype), torch.full((13, 50), 1e30).to(dtype)
    assert (Packed(variant, weight)(x) == float("inf")).all()
    assert (Packed(variant, -weight)(x) == -float("inf")).all()
    x = torch.full((13, 50), 1e5).to(dtype)
    assert error(Packed(variant, weight)(x), oracle(x, weight)) < 2**-7


@needs_library
def test_subnormal_numbers(variant, dtype):
    """They are exact, or zero with the processor's bfloat16 dot product and its tiles."""
    weight, x = torch.full((40, 8), 1e-39).to(dtype), torch.full((3, 8), 2.0).to(dtype)
    got = Packed(variant, weight)(x).double()
    flushes = variant.isa in build.EMULATED and dtype == torch.bfloat16
    assert torch.equal(got, torch.zeros_like(got)) if flushes else error(got, oracle(x, weight), 1e-38) < 2**-7


@needs_library
def test_halfway_cases_round_to_even(variant):
    weight = torch.tensor([[1.0]]).bfloat16()
    residual = torch.tensor([[2.0**-8], [2.0**-8 + 2.0**-15], [3 * 2.0**-8]]).bfloat16()
    got = Packed(variant, weight)(torch.ones(3, 1).bfloat16(), residual)
    assert torch.equal(got, (1 + residual.float()).bfloat16())
    assert got[:, 0].tolist() == [1.0, 1.0 + 2.0**-7, 1.0 + 2.0**-6]


# -- bits -----------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("shape", [(96, 64), (250, 129), (700, 300)])
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(variant, dtype, shape):
    """1,200 rows are packed in three blocks."""
    packed = Packed(variant, drawn(*shape, dtype=dtype), drawn(shape[0], dtype=dtype))
    x, residual = drawn(1200, shape[1], dtype=dtype), drawn(1200, shape[0], dtype=dtype)
    torch.set_num_threads(1)
    alone = torch.cat([packed(x[i : i + 1], residual[i : i + 1]) for i in range(len(x))])
    dice = random.Random(0)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in [*range(1, 101, 1 if shape[0] < 200 else 7), 193, 500, 528, 529, 1100, 1200]:
            start = dice.randint(0, len(x) - rows)
            got = packed(x[start : start + rows], residual[start : start + rows])
            assert torch.equal(got, alone[start : start + rows]), (threads, rows)


@needs_library
def test_gated_rows_have_the_same_bits_in_any_batch(variant, dtype):
    packed = Packed(variant, drawn(2 * 90, 130, dtype=dtype), gated=True)
    x = drawn(100, 130, dtype=dtype)
    alone = torch.cat([packed(x[i : i + 1]) for i in range(len(x))])
    for rows in range(1, 101):
        assert torch.equal(packed(x[100 - rows :]), alone[100 - rows :])


@needs_library
def test_many_threads_share_the_rows_of_few_panels(variant):
    weight, x = drawn(20, 900, dtype=torch.float32), drawn(200, 900, dtype=torch.float32)
    torch.set_num_threads(1)
    want = Packed(variant, weight)(x)
    for threads in (2, 5, 8):
        torch.set_num_threads(threads)
        assert torch.equal(Packed(variant, weight)(x), want)


@needs_library
def test_calls_from_several_python_threads(variant, dtype):
    packed = Packed(variant, drawn(400, 300, dtype=dtype))
    x = drawn(40, 300, dtype=dtype)
    want, wrong = packed(x), []

    def call() -> None:
        for rows in range(1, 41):
            if not torch.equal(packed(x[:rows]), want[:rows]):
                wrong.append(rows)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_library
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_the_plain_weight_can_be_looked_up(variant, dtype, shape):
    weight = drawn(*shape, dtype=dtype)
    packed = Packed(variant, weight)
    ids = torch.randint(0, shape[0], (50,))
    assert torch.equal(packed.lookup(ids), weight[ids])
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError, match=f"no row {wrong} "):
            packed.lookup(torch.tensor([0, wrong]))


# -- the choice -----------------------------------------------------------------------------------------------------


@pytest.fixture
def processor(monkeypatch):
    """Pretend that the processor has these features."""

    def pretend(*names: str) -> None:
        bits = {**ISAS, "vnni": library.VNNI, "fast dot": library.DOT_PAYS, "fast tiles": library.TILES_PAY}
        bits |= {"tiles": library.AMX, "refused": library.TILES_REFUSED}
        features = sum(bits[name] for name in names)
        real = library.load
        monkeypatch.setattr(library, "load", lambda path: (real(path)[0], features))

    return pretend


@needs_library
def test_the_best_variant_is_chosen(processor):
    processor("avx2", "avx512")
    choice = choose("auto", CPU, torch.bfloat16)
    assert (choice.name, choice.invariant, choice.note) == ("avx512", True, "")
    assert choose("avx2", CPU, torch.float32).name == "avx2"
    assert choose("torch", CPU, torch.float32).kernels is None
    for dtype in (torch.float64, torch.float16):
        choice = choose("avx2", CPU, dtype)
        assert choice.name == "torch" and "float32 and bfloat16" in choice.note and choice.fix == "`dtype=bfloat16`"
    assert choose("auto", torch.device("cuda"), torch.bfloat16).name == "torch"


@needs_library
def test_slower_dot_product_is_not_used(processor):
    processor("avx2", "avx512", "avx512bf16", "vnni")
    assert library.available() == ["avx512", "avx512bf16", "avx2"]
    assert choose("auto", CPU, torch.bfloat16).name == "avx512"
    assert choose("auto", CPU, torch.bfloat16, quantized=True).name == "avx512"
    assert choose("avx512bf16", CPU, torch.bfloat16).name == "avx512bf16", "who asks for it gets it"


@needs_library
def test_faster_dot_product_is_used(processor):
    processor("avx2", "avx512", "avx512bf16", "fast dot")
    assert library.available() == ["avx512bf16", "avx512", "avx2"]
    assert choose("auto", CPU, torch.bfloat16).name == "avx512bf16"


@needs_library
def test_avx_vnni_is_used_where_avx_512_is_not(processor):
    processor("avx2", "avxvnni")
    assert library.available() == ["avxvnni", "avx2"]
    for quantized in (False, True):
        assert choose("auto", CPU, torch.bfloat16, quantized=quantized).name == "avxvnni"
        assert choose("avx2", CPU, torch.bfloat16, quantized=quantized).name == "avx2"
    processor("avx2", "avxvnni", "avx512", "vnni")
    assert library.available() == ["avx512", "avxvnni", "avx2"]


@pytest.mark.parametrize(("has", "pays"), [(True, True), (True, False), (False, None)])
def test_dot_product_is_measured_only_if_the_processor_has_it(monkeypatch, has, pays):
    def asked() -> bool:
        assert has, "no such instruction here"
        return pays

    features = ISAS["avx512"] | (ISAS["avx512bf16"] if has else 0)
    fake = SimpleNamespace(pequod_features=lambda: features, dot_pays_avx512bf16=asked)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: fake)
    monkeypatch.setattr(library.structures, "check", lambda found: None)
    assert library.load.__wrapped__(Path("library.so")) == (fake, features | (library.DOT_PAYS if pays else 0))


@needs_library
def test_dot_product_measurement_is_repeatable():
    loaded, features = library.load(build.library())
    if not features & ISAS["avx512bf16"]:
        pytest.skip("this processor has no avx512bf16")
    assert {bool(loaded.dot_pays_avx512bf16()) for _ in range(20)} == {bool(features & library.DOT_PAYS)}


@needs_library
def test_unsupported_variant_is_refused(processor):
    processor("avx2")
    with pytest.raises(ConfigError, match="this processor cannot run avx512; it can run avx2, torch"):
        choose("avx512", CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="unknown instruction set 'sse'; known: auto, amx, avx512bf16"):
        choose("sse", CPU, torch.bfloat16)


@needs_library
def test_a_processor_without_avx2(processor):
    processor()
    choice = choose("auto", CPU, torch.float32)
    assert choice.name == "torch" and "no AVX2" in choice.note and choice.fix


def test_torch_is_chosen_without_a_library_with_a_note(monkeypatch):
    def missing(**_):
        raise build.BuildError("no C++ compiler was found")

    monkeypatch.setattr(build, "library", missing)
    monkeypatch.setattr(build, "supported", lambda: None)
    monkeypatch.setattr(build, "compiler", lambda: None)
    choice = choose("auto", CPU, torch.bfloat16)
    assert choice.name == "torch" and "no C++ compiler" in choice.note and "install g++" in choice.fix
    assert choose("torch", CPU, torch.float32).note == "", "nothing is lost that was not wanted"
    with pytest.raises(ConfigError, match="`cpu_isa=avx2` needs CPU kernels, and there are none"):
        choose("avx2", CPU, torch.bfloat16)


@needs_library
def test_there_is_one_openmp_runtime():
    library.load(build.library())
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    assert len({path for path in paths if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))}) == 1


# -- the bench ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", {"qkv": (64, 48), "head": (100, 33)})
    monkeypatch.setattr(bench, "LARGE", 1 << 15)
    monkeypatch.setattr(bench, "MAX_HEAD_ROWS", 4)
    monkeypatch.setattr(bench.attention, "STEPS", [(2, 1, 20), (1, 7, 30)])
    monkeypatch.setattr(bench.attention, "LARGE", 1 << 15)
    monkeypatch.setattr(bench.logits, "VOCAB", 300)


@pytest.mark.parametrize("isa", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bench_prints_one_json_object(small, capsys, isa, dtype):
    assert bench.main(["--json", "--isa", isa, "--dtype", dtype, "--rows", "1,5", "--seconds", "0"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    choice = choose(isa, CPU, getattr(torch, dtype))
    assert (found["isa"], found["dtype"], found["threads"]) == (choice.name, dtype, torch.get_num_threads())
    assert [(line["shape"], line["rows"]) for line in found["products"]] == [("qkv", 1), ("qkv", 5), ("head", 1)]
    assert len(err.splitlines()) >= 5
    assert [(line["batch"], line["new"], line["context"]) for line in found["attention"]] == [(2, 1, 20), (1, 7, 30)]
    for line in found["attention"]:
        assert all(line[f"{name}seconds"] > 0 for name in ("", "int8_", "reference_", "sdpa_"))
        assert all(line[f"{name}gb_per_s"] > 0 for name in ("", "int8_", "probe_"))
        assert line["error"] < 0.02 and line["int8_error"] < 0.03
        assert line["invariant"] or line["backend"] == "reference"
    assert len(found["logits"]) == 12
    for line in found["logits"]:
        assert line["seconds"] > 0 and line["torch_seconds"] > 0 and line["same"]
        assert line["invariant"] or not choice.invariant
    for line in found["products"]:
        assert line["seconds"] > 0 and line["torch_seconds"] > 0 and line["gflop_per_s"] > 0
        assert line["error"] < 0.02 and (line["invariant"] or not choice.invariant)
        kinds = ["int8", "int4"] if choice.kernels is not None and choice.kernels.quantizes else []
        assert list(line["quantized"]) == kinds
        for quantized in line["quantized"].values():
            assert quantized["seconds"] > 0 and quantized["error"] < 0.2 and quantized["invariant"]


def test_bench_refuses_invalid_arguments(small, capsys, monkeypatch):
    monkeypatch.setitem(library.ISAS, "avx2", 1 << 20)
    for flag in ([], ["--json"]):
        assert bench.main([*flag, "--isa", "avx2"]) == 2
        out, err = capsys.readouterr()
        assert "avx2" in (json.loads(out)["error"] if flag else err)
    for wrong in (["--rows", "0"], ["--rows", "a"], ["--threads", "0"], ["--isa", "sse"]):
        with pytest.raises(SystemExit):
            bench.main(wrong)
