"""Loads the kernels' library, and chooses what computes a model's matmuls and what samples.

The choice depends on the processor's features, on whether there is a library, and on the user's setting. With our
kernels a row has the same bits in any batch. With torch it does not, so torch is used only where it must be (no
library, no kernel for the processor). Sampling is chosen separately: its kernels sample the same tokens as torch, and
are faster on every processor.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ..types import ConfigError
from . import build, structures
from .build import BASES

# Instruction sets, the most capable first, each with its bit in pequod_features() or, of amx, in `load`. `best_first`
# orders them by speed.
ISAS = {"amx": 64, "avx512bf16": 4, "avx512": 2, "avxvnni": 512, "avx2": 1}
AMX, VNNI = 8, 16
# Measured or tried when the library is loaded: the processor's bfloat16 dot product is faster than multiply-adds; its
# tiles (AMX) multiply faster than both; the system refuses them to this process.
DOT_PAYS, TILES_PAY, TILES_REFUSED = 32, 128, 256
CHOICES = ("auto", *ISAS, "torch")
REPAIRS = "start it outside of sandboxes and emulators, or set `cpu_isa` to what computes now"
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
REFUSED = 1  # returned by the trial of tiles if the system does not let the process use them
KERNEL_KINDS = 3  # whose times are counted separately: matmul, attention, other


def cache_dtypes() -> list[tuple[torch.dtype, torch.dtype, str]]:
    """Return the supported pairs of model dtype and cache dtype, each with its name in the kernels' names."""
    same = [(dtype, dtype, name) for dtype, name in DTYPES.items()]
    return same + [(dtype, torch.int8, f"{name}_int8") for dtype, name in DTYPES.items()]


def address(function: Any) -> int:
    """Return the address of a library's function, for kernels that call it."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def find(library: ctypes.CDLL, isa: str, name: str) -> Any:
    """Return a function of a variant, or of the one that it is based on if it has none of its own."""
    has_it = isa not in BASES or hasattr(library, f"{name}_{isa}")
    return getattr(library, f"{name}_{isa if has_it else BASES[isa]}")


class Kernels:
    """One variant of the library: the functions for one instruction set."""

    def __init__(self, library: ctypes.CDLL, isa: str, *, quantizes: bool = True) -> None:
        """`quantizes`: whether the processor can run the variant's matmuls with quantized weights, see `_quantizes`."""
        self.quantizes = quantizes
        self.lossless = False  # whether weights in bfloat16 are compressed while they are packed
        pointer, integer, long = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self.library, self.isa = library, isa
        own = partial(find, library, isa)
        self.multiply = {dtype: own(f"matmul_{name}") for dtype, name in DTYPES.items()}
        self.multiply_int8 = {dtype: own(f"matmul_int8_{name}") for dtype, name in DTYPES.items()}
        # By the weights' bits and the activations' dtype.
        self.multiply_blocks = {
            (bits, dtype): own(f"matmul_blocks{bits}_{name}") for bits in (4, 5, 6, 8) for dtype, name in DTYPES.items()
        }
        self.multiply_codes = {dtype: own(f"matmul_codes_{name}") for dtype, name in DTYPES.items()}
        self.multiply_lossless = own("matmul_lossless")
        self.multiply_joined = own("matmul_joined")
        multiply = *self.multiply.values(), *self.multiply_int8.values(), *self.multiply_blocks.values()
        multiply += (*self.multiply_codes.values(),)
        for function in (*multiply, self.multiply_lossless, self.multiply_joined):
            function.argtypes = [pointer, pointer, pointer, pointer, long, integer]
        self.packers = {name: own(name) for name in ("pack", "quantize", "round_rows", "repack", "compress")}
        for function in self.packers.values():
            function.argtypes = [pointer, long, pointer, integer]
        self.lookup = own("lookup")
        self.lookup.argtypes, self.lookup.restype = [pointer, long, pointer, long, pointer], long
        self.dequantized = own("dequantized")
        self.dequantized.argtypes, self.dequantized.restype = [pointer, long, pointer, long, pointer], long
        self.scales_bytes = own("scales_bytes")
        self.scales_bytes.argtypes, self.scales_bytes.restype = [integer, long], long
        self.dequantized_blocks = own("dequantized_blocks")
        self.dequantized_blocks.argtypes = [pointer, long, pointer, long, pointer]
        self.dequantized_blocks.restype = long
        self.lossless_panel_bytes = own("lossless_panel_bytes")
        self.lossless_codes_bytes = own("lossless_codes_bytes")
        for function in (self.lossless_panel_bytes, self.lossless_codes_bytes):
            function.argtypes, function.restype = [long], long
        self.lossless_failures = own("lossless_failures")
        self.lossless_failures.argtypes, self.lossless_failures.restype = [pointer], long
        self.lossless_lookup = own("lossless_lookup")
        self.lossless_lookup.argtypes, self.lossless_lookup.restype = [pointer, pointer, long, pointer], long
        self.norm = {dtype: own(f"norm_{name}") for dtype, name in DTYPES.items()}
        # With weights in float32, and one rounding.
        self.norm_wide = {
            torch.float32: self.norm[torch.float32],
            torch.bfloat16: own("norm_wide_bfloat16"),
        }
        self.norm_centered = {dtype: own(f"norm_centered_{name}") for dtype, name in DTYPES.items()}
        for function in (*self.norm.values(), *self.norm_wide.values(), *self.norm_centered.values()):
            function.argtypes = [pointer, pointer, pointer, long, long, ctypes.c_float, integer]
            function.restype = None
        self.softcap = own("softcap")
        self.softcap.argtypes, self.softcap.restype = [pointer, long, ctypes.c_float, integer], None
        self.sigmoid, self.softplus = own("sigmoid"), own("softplus")
        for function in (self.sigmoid, self.softplus):
            function.argtypes, function.restype = [pointer, long], None
        self.gates = {dtype: own(f"gates_{name}") for dtype, name in DTYPES.items()}
        for function in self.gates.values():
            function.argtypes, function.restype = [pointer, pointer, pointer, long, long, integer], None
        self.experts = {dtype: own(f"experts_{name}") for dtype, name in DTYPES.items()}
        for function in self.experts.values():
            function.argtypes = [pointer, pointer, pointer, long, long, integer]
        self.head_products = own("head_products")
        self.head_products.argtypes = [pointer, long, pointer, pointer, long, long, long, integer]
        self.delta = {dtype: own(f"delta_{name}") for dtype, name in DTYPES.items()}
        for function in self.delta.values():
            function.argtypes = [pointer, pointer, pointer, pointer, integer]
        self.mamba2 = {dtype: own(f"mamba2_{name}") for dtype, name in DTYPES.items()}
        for function in self.mamba2.values():
            function.argtypes = [pointer, pointer, pointer, pointer, pointer, integer]
        # By the model's dtype and the cache's.
        self.layers = {(dtype, cache): own(f"layers_{name}") for dtype, cache, name in cache_dtypes()}
        for function in self.layers.values():
            function.argtypes = [pointer]
        self.best = own("best")
        self.best.argtypes, self.best.restype = [pointer, long, long, pointer, pointer, integer], None
        self.sample = own("sample")
        self.sample.argtypes = [pointer, long, long, pointer, pointer, pointer, integer]
        self.process = own("process")
        self.process.argtypes = [pointer, long, long, pointer, pointer, integer]
        self.top_logits = own("top_logits")
        self.top_logits.argtypes = [pointer, long, long, long, pointer, pointer, pointer, integer]
        self.forbid = own("forbid")
        self.forbid.argtypes, self.forbid.restype = [pointer, long, pointer, pointer, long, long], None
        self.width: int = own("panel_width")()  # rows of a weight in a panel


@dataclass(frozen=True, slots=True)
class Choice:
    """What computes matmuls: our kernels, or torch if `kernels` is None."""

    kernels: Kernels | None
    note: str = ""  # the disadvantage of this choice
    fix: str = ""  # how to avoid it
    alone: bool = True  # no part of a row's result is summed by torch
    is_uniform: bool = (
        False  # our Triton kernels compute all of a model's products on a GPU, see models/gpu/invariance.py
    )
    is_proven: bool = False  # that they compute a row alike in any batch

    @property
    def name(self) -> str:
        return "triton" if self.is_uniform else self.setting

    @property
    def setting(self) -> str:
        """What selects the same in another process, see `choose`."""
        return "torch" if self.kernels is None else self.kernels.isa

    @property
    def invariant(self) -> bool:
        """Whether a row has the same bits in any batch, provided that attention's results have."""
        return self.is_proven or (self.kernels is not None and self.alone)


class Clock:
    """Reads the time spent in the kernels of these libraries."""

    def __init__(self, libraries: Iterable[ctypes.CDLL]) -> None:
        kind = ctypes.c_int64 * KERNEL_KINDS
        self._counters = [kind.in_dll(library, "pequod_nanoseconds") for library in libraries]

    def __bool__(self) -> bool:
        return bool(self._counters)

    def seconds(self) -> float:
        """Return the time this process has spent in kernels, added up over the threads that called them."""
        return sum(map(sum, self._counters)) / 1e9


@cache
def load(path: Path) -> tuple[ctypes.CDLL, int]:
    """Load the library; return it and the processor's features. Raises OSError."""
    library = ctypes.CDLL(str(path))
    structures.check(library)
    features = library.pequod_features()
    if features & ISAS["avx512bf16"] and library.dot_pays_avx512bf16():
        features |= DOT_PAYS
    if features & AMX and features & VNNI:
        features |= _tried(library, best_first(features)[0])
    return library, features


def load_built() -> tuple[ctypes.CDLL, int]:
    """Load the library of these sources, compiling it if necessary; see `load`. Raises build.BuildError or OSError."""
    path = build.library()
    try:
        return load(path)
    except OSError:
        return load(_compiled_again(path))


@cache
def _compiled_again(broken: Path) -> Path:
    """Return a library in place of one that cannot be loaded. It is compiled once in a process."""
    return build.library(broken=broken)


def _tried(library: ctypes.CDLL, other: str) -> int:
    """Return the features of a processor with tiles. `other`: the fastest variant without them."""
    failed = library.trial_amx()
    if failed:
        return TILES_REFUSED if failed == REFUSED else 0
    return ISAS["amx"] | (TILES_PAY if library.tiles_pay_amx(getattr(library, f"matmul_bfloat16_{other}")) else 0)


def available() -> list[str]:
    """Return the variants that this processor can run, fastest first. Raises build.BuildError or OSError."""
    return best_first(load_built()[1])


def best_first(features: int) -> list[str]:
    """Return the variants that a processor with these features can run, fastest first."""
    order = ["avx512bf16", "avx512"] if features & DOT_PAYS else ["avx512", "avx512bf16"]
    order = ["amx", *order] if features & TILES_PAY else [*order, "amx"]
    return [isa for isa in [*order, "avxvnni", "avx2"] if features & ISAS[isa]]


def choose(setting: str, device: torch.device, dtype: torch.dtype, *, quantized: bool = False) -> Choice:
    """Return what computes a model's matmuls on this machine.

    `setting` is auto, one of ISAS, or torch. Raises ConfigError if that cannot run here. Only our kernels support
    quantized weights.
    """
    if setting not in CHOICES:
        raise ConfigError(f"unknown instruction set {setting!r}; known: {', '.join(CHOICES)}")
    if quantized:
        return _for_quantized(setting, device, dtype)
    if device.type != "cpu" or setting == "torch":
        return Choice(None)
    if dtype not in DTYPES:
        lost = f"the CPU kernels take {' and '.join(DTYPES.values())}: torch computes the products of this model"
        return Choice(None, lost, "`dtype=bfloat16`")
    try:
        library, features = load_built()
    except (build.BuildError, OSError) as error:
        if setting != "auto":
            raise ConfigError(f"`cpu_isa={setting}` needs CPU kernels, and there are none: {error}") from None
        lost = "torch computes the products, slower and with results that depend on the batch"
        fix = "repair the compiler or the cache folder, and start again"
        if build.supported() is not None:
            fix = "use a machine with Linux on x86-64"
        elif build.compiler() is None:
            fix = "install g++ and start again: the first start then compiles them"
        return Choice(None, f"no CPU kernels ({error}): {lost}", fix)
    have = best_first(features)
    if setting == "auto" and not have:
        lost = "this processor has no AVX2: torch computes the products, and results depend on the batch"
        return Choice(None, lost, "use a processor of the last ten years")
    if setting not in ("auto", *have):
        reason = _lost(features) if setting == "amx" else ""
        able = f"it can run {', '.join([*have, 'torch'])}"
        raise ConfigError(f"this processor cannot run {setting}{reason and f' ({reason})'}; {able}")
    return _chosen(library, have, features, setting, dtype)


def _chosen(library: ctypes.CDLL, have: list[str], features: int, setting: str, dtype: torch.dtype) -> Choice:
    """Return our kernels: the variant that `setting` names, or the first of `have`."""
    isa = have[0] if setting == "auto" else setting
    kernels = Kernels(library, isa, quantizes=_quantizes(isa, features))
    lost = _lost(features) if setting == "auto" and dtype == torch.bfloat16 else ""
    return Choice(kernels, lost and f"{isa} computes products and attention, slower than AMX: {lost}", lost and REPAIRS)


def _lost(features: int) -> str:
    """Return why the processor's tiles are not used, or an empty string."""
    if not features & AMX or features & ISAS["amx"]:
        return ""
    if features & TILES_REFUSED:
        return "the system refuses its registers to this process"
    return "it failed a trial when the kernels were loaded"


def for_sampling(setting: str, device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels that sample from a model's logits, whatever computes its matmuls; None if torch samples.

    `setting` as for `choose`, which raises the errors; "torch" means no kernels. `dtype` is the model's. Logits are
    float32, except those of float64 models, which the kernels do not support.
    """
    isa = settle(setting, device)
    if device.type != "cpu" or isa == "torch" or dtype == torch.float64:
        return None
    return Kernels(load_built()[0], BASES.get(isa, isa))


def settle(setting: str, device: torch.device) -> str:
    """Resolve a setting to an instruction set on this machine, or to torch if it has no such kernels.

    The faster of two is measured when the library is loaded, so another process may choose differently.
    """
    if device.type != "cpu" or setting == "torch":
        return setting
    try:
        have = best_first(load_built()[1])
    except (build.BuildError, OSError):
        return "torch"
    return next((isa for isa in have if setting in ("auto", isa)), "torch")


def _quantizes(isa: str, features: int) -> bool:
    """Return whether a variant's matmuls with quantized weights can run: with AVX-512 they need VNNI."""
    return isa in ("avxvnni", "avx2") or bool(features & VNNI)


def _for_quantized(setting: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """Return the choice for quantized weights: AVX-512 needs VNNI for them."""
    need = "quantized weights need our CPU kernels"
    if device.type != "cpu":
        raise ConfigError(f"{need}, and this engine runs on {device}")
    if setting == "torch":
        raise ConfigError(f"{need}, and `cpu_isa=torch` disables them")
    if dtype not in DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(f"{need}, which take {' and '.join(DTYPES.values())}, not {name}: set `dtype=bfloat16`")
    try:
        library, features = load_built()
    except (build.BuildError, OSError) as error:
        raise ConfigError(f"{need}, and there are none: {error}") from None
    have = [isa for isa in best_first(features) if _quantizes(isa, features)]
    if not have:
        raise ConfigError(f"{need}, and this processor has no AVX2")
    if setting not in ("auto", *have):
        raise ConfigError(
            f"{setting} computes no products of quantized weights on this processor; {', '.join(have)} can"
        )
    return _chosen(library, have, features, setting, dtype)
