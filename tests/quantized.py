"""Small models with quantized weights, stored as AutoGPTQ, AutoAWQ, compressed-tensors and fp8 checkpoints store them.

The layouts are written here from their libraries' published formats, independently of the engine's readers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models import VOCAB

HIDDEN, INNER = 256, 384
SETTINGS = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column in each position of a word
Stored = tuple[dict[str, Tensor], Tensor]  # the tensors of a weight, and its numbers in float64


@dataclass(frozen=True)
class Kind:
    """A kind of checkpoint: its quantization_config, and how a weight [rows, columns] is stored."""

    config: dict[str, Any]
    store: Callable[[Tensor], Stored]
    packed: str | None  # the type of blocks in memory; None: dequantized


def words(numbers: Tensor, bits: int) -> Tensor:
    """Pack unsigned numbers [a, n] into [a, n * bits / 32] int32, the first in the lowest bits."""
    each = 32 // bits
    numbers = torch.nn.functional.pad(numbers.long(), (0, -numbers.shape[1] % each)).unflatten(1, (-1, each))
    packed = sum(numbers[..., i] << (bits * i) for i in range(each))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def quantize(
    weight: Tensor, bits: int, group: Tensor, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return stored numbers [rows, columns], zero points and scales [rows, groups], and the numbers that these make.

    `group`: [columns], the group of each column.
    """
    count, top = int(group.max()) + 1, 2**bits - 1
    low, high = torch.zeros(2, len(weight), count)
    low = low.scatter_reduce(1, group.expand_as(weight), weight, "amin")
    high = high.scatter_reduce(1, group.expand_as(weight), weight, "amax")
    if symmetric:
        high = torch.maximum(-low, high)
        scales = (high / 2 ** (bits - 1)).clamp(min=1e-6).to(dtype)
        zeros = torch.full_like(high, 2 ** (bits - 1))
    else:
        scales = ((high - low) / top).clamp(min=1e-6).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, top)
    scale, zero = scales.float()[:, group], zeros[:, group]
    numbers = (weight / scale + zero).round().clamp(0, top)
    return numbers.long(), zeros.long(), scales, (numbers - zero).double() * scale.double()


def contiguous(columns: int, size: int) -> Tensor:
    return torch.arange(columns) // (columns if size == -1 else size)


def gptq(
    bits: int = 4, size: int = 128, *, sym: bool = True, order: str = "", v2: bool = False, packed: str | None = None
) -> Kind:
    """`order`: "shared" or "own", whether the weights of a layer share an order of columns."""
    made = 0

    def store(weight: Tensor) -> Stored:
        nonlocal made
        made += 1
        group = contiguous(weight.shape[1], size)
        if order:
            generator = torch.Generator().manual_seed(made if order == "own" else 0)
            group = group[torch.randperm(len(group), generator=generator)]
        numbers, zeros, scales, exact = quantize(weight, bits, group, sym, torch.float16)
        tensors = {
            "qweight": words(numbers, bits).T,
            "qzeros": words(zeros.T, bits) - (0 if v2 else {4: 0x11111111, 8: 0x01010101}[bits]),
            "scales": scales.T,
            "g_idx": group.int(),
        }
        return tensors, exact

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym, "desc_act": bool(order),
        "checkpoint_format": "gptq_v2" if v2 else "gptq", "lm_head": False,
    }  # fmt: skip
    return Kind(config, store, packed)


def awq(size: int = 128) -> Kind:
    def store(weight: Tensor) -> Stored:
        numbers, zeros, scales, exact = quantize(weight, 4, contiguous(weight.shape[1], size), False, torch.float16)

        def pack(values: Tensor) -> Tensor:  # [rows, n] -> [n, rows / 8]
            return words(values.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4)

        return {"qweight": pack(numbers), "qzeros": pack(zeros), "scales": scales.T}, exact

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    return Kind(config | {"modules_to_not_convert": None}, store, "Q4_Z")


def compressed(stored: str, packed: str | None, store: Callable[[Tensor], Stored], **weights: Any) -> Kind:
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    config = {
        "quant_method": "compressed-tensors", "format": stored, "quantization_status": "compressed",
        "config_groups": groups, "ignore": ["lm_head"],
    }  # fmt: skip
    return Kind(config, store, packed)


def pack_quantized(
    bits: int, size: int, *, symmetric: bool = True, packed: str | None, dtype: torch.dtype = torch.bfloat16
) -> Kind:
    def store(weight: Tensor) -> Stored:
        numbers, zeros, scales, exact = quantize(weight, bits, contiguous(weight.shape[1], size), symmetric, dtype)
        tensors = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(zeros.T, bits).T
        return tensors, exact

    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    return compressed("pack-quantized", packed, store, num_bits=bits, symmetric=symmetric, **strategy)


def int_quantized(strategy: str = "channel", *, symmetric: bool = True, packed: str | None = "Q8_0") -> Kind:
    def store(weight: Tensor) -> Stored:
        shaped = weight if strategy == "channel" else weight.reshape(1, -1)
        numbers, zeros, scales, exact = quantize(shaped, 8, contiguous(shaped.shape[1], -1), symmetric, torch.bfloat16)
        tensors = {
            "weight": (numbers - 128).to(torch.int8).view(weight.shape),
            "weight_scale": scales if strategy == "channel" else scales.view(1),
        }
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, exact.view(weight.shape)

    return compressed("int-quantized", packed, store, strategy=strategy, symmetric=symmetric)


def fp8(strategy: str, method: str = "fp8") -> Kind:
    """`strategy`: tensor, channel, or block (of 128 rows and 128 columns)."""

    def store(weight: Tensor) -> Stored:
        rows, columns = weight.shape
        high, wide = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[strategy]
        scales = (
            torch.stack(
                [torch.stack([part.abs().max() for part in strip.split(wide, 1)]) for strip in weight.split(high)]
            )
            / 448
        )
        each = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        numbers = (weight / each).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if method == "fp8" and strategy == "block" else "weight_scale"
        stored = scales.view(()) if strategy == "tensor" else scales
        return {"weight": numbers, name: stored}, numbers.double() * each.double()

    if method == "compressed-tensors":
        shape = {"block_structure": [128, 128]} if strategy == "block" else {}
        kind = compressed("float-quantized", None, store, type="float", strategy=strategy, **shape)
        rounded = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        kind.config["config_groups"]["group_0"]["input_activations"] = rounded
        return kind
    config: dict[str, Any] = {"quant_method": method, "modules_to_not_convert": ["lm_head"]}
    if strategy == "block":
        config["weight_block_size"] = [128, 128]
    return Kind(config, store, None)


def write(
    folder: Path,
    kind: Kind,
    *,
    name: str = "llama",
    dtype: torch.dtype = torch.float32,
    plain: Callable[[str], bool] = lambda module: False,
    **settings: Any,
) -> Any:
    """Write a small model whose linear layers are quantized, except the head and those that `plain` selects; return
    transformers' model with the numbers that the checkpoint makes, in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(name, **copy.deepcopy(SETTINGS | settings))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for parameter in model.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1 / 8
            parameter.copy_((torch.randn_like(parameter) * scale + (parameter.dim() == 1)).to(dtype))
        model.model.embed_tokens.weight.mul_(16)
        tensors |= {key: value.to(dtype) for key, value in model.state_dict().items()}
        if config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        exact = {}
        for module, linear in model.named_modules():
            if isinstance(linear, torch.nn.Linear) and module != "lm_head" and not plain(module):
                del tensors[f"{module}.weight"]
                stored, exact[f"{module}.weight"] = kind.store(linear.weight)
                tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
        model = model.double()
        for key, numbers in exact.items():
            model.get_parameter(key).copy_(numbers)
    source = config.to_dict() | {
        "architectures": [type(model).__name__],
        "dtype": str(dtype).removeprefix("torch."),
        "quantization_config": kind.config,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return model


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of the quantization_config; None removes one."""
    path = folder / "config.json"
    source = json.loads(path.read_text())
    found = source["quantization_config"] | changes
    source["quantization_config"] = {key: value for key, value in found.items() if value is not None}
    path.write_text(json.dumps(source))
