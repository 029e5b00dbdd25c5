"""Writes a GGUF file's hyperparameters as a config.json, and its tensors' names as those of safetensors checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ..bounds import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_SIZE
from ..grouped_rows import MAX_PIECES, Rows, count_of, grouped_rows
from ..types import ModelError
from .architectures import architecture_of
from .keys import Keys
from .latent import BY_HEAD, TOGETHER
from .names import FLAT, LOOKED_UP, NAMES, NEGATIVE_EXPONENTIALS, SINGLE_ROWS, Architecture, is_norm
from .reader import PLAIN, TYPES, Model, TensorInfo
from .scaling import LISTS, scaling_of
from .state_layers import CONVOLUTIONS

LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)")
MAX_TENSORS = 8 * MAX_EXPERTS  # of all experts
UNUSED = re.compile(r"^blk\.(\d{1,5})\.nextn\.")  # of layers that predict further tokens


class Stored(NamedTuple):
    """A tensor of the file, and how its numbers differ from those of a safetensors checkpoint."""

    tensor: TensorInfo
    interleaved: int  # rows of a head, if the halves of each are interleaved; else 0
    shift: float  # added to its numbers
    is_negative_exponential: bool = False  # of x there is -exp(x)
    rows: Rows = ()  # of the stored tensor those that it has; empty: all


def config_of(model: Model) -> dict[str, Any]:
    """Return the config.json of a model. Raises ModelError if the architecture is not supported."""
    keys, tensors = Keys(model), model.tensors
    architecture = architecture_of(keys)
    if keys.number("expert_count", 0) > 1 and not architecture.has_experts:
        raise ModelError(
            f"GGUF files of the architecture {keys.architecture} with experts are not supported; use the model's "
            "safetensors files"
        )
    if keys.get("attention.causal") is False:
        raise ModelError("the GGUF file's model attends to later tokens, too, which is not supported")
    heads = keys.whole("attention.head_count", MAX_HEADS)
    hidden = keys.whole("embedding_length", MAX_SIZE)
    head_dim = keys.whole("attention.key_length", MAX_HEADS, hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if architecture.has_latents or (key == "rope.dimension_count" and architecture.rotates_partly):
            continue
        if keys.number(key, head_dim) != head_dim:
            raise ModelError(f"the GGUF file's {key} differs from the size of a head, which is not supported")
    embedding, (eps, eps_name) = tensors.get("token_embd.weight"), architecture.eps
    number = keys.first if architecture.layers_differ else keys.number
    config = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        # Files of models whose layers all have experts may have no size of an MLP.
        "intermediate_size": number("feed_forward_length", keys.get("expert_feed_forward_length")),
        "num_hidden_layers": keys.whole("block_count", MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.number("context_length"),
        eps_name: keys.number(eps),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "vocab_size": embedding.shape[0] if embedding else keys.number("vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in tensors),  # the first layer may have no queries
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "hidden_act": "silu",
        "dtype": "float32" if _types(tensors) == {"F32"} else "bfloat16",
    }
    if scaling := scaling_of(keys, head_dim):
        config["rope_scaling"] = scaling
    config |= architecture.settings(keys, config)
    # The length in a file is that with the scaling, in config.json that without, but for layers of two kinds.
    if (config.get("rope_scaling") or {}).get("rope_type") == "linear" and "rope_local_base_freq" not in config:
        config["max_position_embeddings"] = int(config["max_position_embeddings"] / config["rope_scaling"]["factor"])
    if quantized := _types(tensors) - PLAIN:
        used = {name: tensor for name, tensor in tensors.items() if _is_used(name, config)}
        stored = {name: tensor for name, tensor in used.items() if not name.endswith(f".{TOGETHER}.weight")}
        endings = tuple(f".{name}.weight" for name in BY_HEAD)
        of_heads = [tensor for name, tensor in stored.items() if name.endswith(endings)]
        tables = used.keys() & (LOOKED_UP if "output.weight" in used else LOOKED_UP - {"token_embd.weight"})
        config["quantization_config"] = {
            "quant_method": "gguf",
            "numbers": _numbers(stored.values()),
            "of_heads": _numbers(of_heads),
            "looked_up": _numbers(used[name] for name in sorted(tables)),
            "types": sorted(quantized),
        }
    return config


def checkpoint_names(model: Model) -> dict[str, Stored]:
    """Return each tensor by its name in a safetensors checkpoint."""
    architecture, config = architecture_of(Keys(model)), config_of(model)
    head_dim, grouped, named, pieces = config["head_dim"], _grouped(config), {}, 0
    _check_experts(model.tensors, architecture)
    for name, in_file in model.tensors.items():
        if name in LISTS:
            continue
        found = LAYER.fullmatch(name)
        is_flat = found is not None and found[2].removesuffix(".weight") in FLAT
        tensor = replace(in_file, shape=(prod(in_file.shape),)) if is_flat else in_file
        if len(tensor.shape) == 1 and (kind := TYPES[tensor.type].name) not in PLAIN:
            raise ModelError(f"the GGUF file's vector {name[:64]} is in {kind}, which is not supported")
        if found is not None and (parameter := architecture.parameters.get(found[2])):
            named[f"model.layers.{found[1]}.{parameter}"] = Stored(tensor, 0, 0.0, found[2] in NEGATIVE_EXPONENTIALS)
            continue
        own, _, kind = name.rpartition(".")
        in_layer = found[2].removesuffix(f".{kind}") if found is not None else ""
        if found is not None and in_layer in architecture.names:
            own = f"model.layers.{found[1]}.{architecture.names[in_layer]}"
        else:
            own = NAMES.get(own, UNUSED.sub(r"model.layers.\1.nextn.", own))
        shaped = replace(tensor, shape=_shape(in_layer, tensor.shape)) if kind == "weight" else tensor
        of_heads = in_layer in ("attn_q", "attn_k")
        interleaved = head_dim if of_heads and architecture.is_interleaved else 0
        module, _, last = own.rpartition(".")
        if last in grouped:
            pieces += sum(map(len, grouped[last].values()))
            if pieces > MAX_PIECES:
                raise ModelError(f"the rows of the GGUF file's tensors are in more than {MAX_PIECES} pieces")
            stored = [(f"{module}.{each}", part) for each, part in _ungrouped(name, tensor, grouped[last]).items()]
        else:
            shift = architecture.norm_shift if is_norm(name) else 0.0
            parts = _experts(own, shaped) if "{}" in own else [(own, shaped)]
            stored = [(each, Stored(part, interleaved, shift)) for each, part in parts]
        _add(named, name, {f"{each}.{kind}": part for each, part in stored})
    return named


def _add(named: dict[str, Stored], name: str, own: Mapping[str, Stored]) -> None:
    """Add the tensors that the file's tensor `name` holds."""
    if own.keys() & named.keys():
        raise ModelError(f"the GGUF file holds {name[:64]} and other tensors for the same weights")
    named.update(own)


def _grouped(config: Mapping[str, Any]) -> dict[str, dict[str, Rows]]:
    """Return the tensors whose rows are grouped, see grouped_rows: those of Qwen3-Next, whose heads are not tiled."""
    if config.get("linear_value_heads_tiled", True):
        return {}
    sizes = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
    return grouped_rows(*(config[f"linear_{size}"] for size in sizes))


def _ungrouped(name: str, tensor: TensorInfo, parts: Mapping[str, Rows]) -> dict[str, Stored]:
    """Return the tensors that one with grouped rows holds."""
    total = sum(map(count_of, parts.values()))
    if not tensor.shape or tensor.shape[0] != total:
        raise ModelError(f"the GGUF file's {name[:64]} has the shape {list(tensor.shape)}, not {total} rows")
    size, divided = tensor.num_bytes // total, {}
    for own, rows in parts.items():
        count = count_of(rows)
        part = replace(tensor, shape=(count, *tensor.shape[1:]), num_bytes=count * size)
        divided[own] = Stored(part, 0, 0.0, rows=rows)
    return divided


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a layer's weight has in checkpoints."""
    if name in CONVOLUTIONS:
        return shape[0], 1, *shape[1:]
    if name in BY_HEAD and len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    return (1, *shape) if name in SINGLE_ROWS and len(shape) == 1 else shape


def _check_experts(tensors: Mapping[str, TensorInfo], architecture: Architecture) -> None:
    """Raise ModelError for more experts than any model has: each gets tensors of its own."""
    total = 0
    for name, tensor in tensors.items():
        found = LAYER.fullmatch(name)
        if found is not None and "{}" in architecture.names.get(found[2].rpartition(".")[0], ""):
            total += tensor.shape[0]
    if total > MAX_TENSORS:
        raise ModelError(f"the GGUF file has {total} tensors of experts, more than {MAX_TENSORS}")


def _experts(name: str, tensor: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """Return the name and the part of each expert of a tensor with all experts of a layer."""
    count, *shape = tensor.shape
    if len(shape) < 2 and TYPES[tensor.type].name not in PLAIN:
        raise ModelError(f"the GGUF file's biases of experts are in {TYPES[tensor.type].name}, which is not supported")
    size = tensor.num_bytes // max(1, count)
    for index in range(count):
        yield (
            name.format(index),
            replace(tensor, shape=tuple(shape), offset=tensor.offset + index * size, num_bytes=size),
        )


def _is_used(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether the model has a tensor. Files may have layers that predict further tokens, and keys and values of
    layers that share those of another."""
    layers = config["num_hidden_layers"]
    if found := UNUSED.match(name):
        return int(found[1]) < layers
    if (found := LAYER.fullmatch(name)) is None:
        return True
    layer, own = int(found[1]), layers - config.get("num_kv_shared_layers", 0)
    return layer < own or (layer < layers and not found[2].startswith(("attn_k.", "attn_v.", "attn_k_norm.")))


def _numbers(tensors: Iterable[TensorInfo]) -> Counter[str]:
    """Return the numbers of some tensors by their types."""
    numbers: Counter[str] = Counter()
    for tensor in tensors:
        numbers[TYPES[tensor.type].name] += prod(tensor.shape)
    return numbers


def _types(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """Return the types of the matrices."""
    return {TYPES[tensor.type].name for tensor in tensors.values() if len(tensor.shape) > 1}
