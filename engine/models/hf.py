"""Runs models that the native decoder does not support with transformers' code, with attention over the paged cache.

A step's rows are flattened into one sequence of tokens with batch size 1. An attention function is registered with
transformers under our name, and the step is passed as a keyword argument through the model's forward to each layer's
attention. Whether a model can be served is not decided by a list of names: a trial run without weights (trial.py) shows
which layers call the attention function, and with which arguments; a short run with the weights shows that only
attention passes information from one token to another. On a CPU plain linear layers are packed (packing.py).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention import AttentionMeta, KVCache
from ..attention.reference import Reference
from ..bounds import MAX_LAYERS, MAX_SIZE
from ..config import EngineConfig
from ..files import read_json, shown
from ..kernels.library import Choice, Kernels
from ..out_of_memory import is_out_of_memory
from ..types import ModelError
from .checkpoint.dummy import DummyWeights, initialize
from .checkpoint.weights import Checkpoint
from .executor import Executor
from .families.architectures import architecture
from .forward import Forward, Outputs
from .packing import Swap, pack, unpack
from .rope import MAX_NUMBER
from .spec import ModelSpec, choose_dtype, serve_len
from .trial import NOT_THERE, first_line, overheard, quiet, refusal, try_without_weights

SERVE = "pequod"  # without a mask function of this name, transformers makes no masks
# Settings that count parts of a model. transformers makes lists of that length before it creates a model.
COUNTS = re.compile(r"(layer|block|depth|stage|expert|head|group)s?$|_replace$")


def _serve(
    module: Any,
    query: Tensor,  # [1, heads, tokens, head_dim]; key and value may have other numbers of heads and sizes
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    pequod_step: Forward | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention in a step. Other arguments of the layer are in its AttentionLayer."""
    if pequod_step is None:
        raise RuntimeError(f"{type(module).__name__} does not hand keyword arguments on to its attention")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    out = pequod_step.attend(module.layer_idx, q, k, v)
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(SERVE, _serve)


def describe(
    folder: Path, source: dict[str, Any], config: EngineConfig, checkpoint: Checkpoint | None = None
) -> ModelSpec:
    """Return the spec of a folder, from its config.json and a trial run without weights. Raises ModelError.

    `checkpoint`: the folder's weights. config.json is compared with them before a model of that size is created.
    """
    name = architecture(source)
    _check_counts(source)
    read_json(folder / "generation_config.json")  # transformers reads it without bounds
    settings = _settings(folder, name)
    kind = _class(settings, name, source)
    if getattr(kind, "_is_stateful", False):
        raise ModelError(refusal(name, "its layers keep a state of their own beside keys and values"))
    dtype = choose_dtype(source, config)
    with quiet():
        trial, vocab_size, hidden_size, num_params = try_without_weights(settings, kind, name, dtype, checkpoint)
    if vocab_size > MAX_SIZE:
        raise ModelError(f"config.json asks for {vocab_size} logits, but at most {MAX_SIZE} are served")
    count = settings.get_text_config().num_hidden_layers
    if trial.objection:
        raise ModelError(refusal(name, trial.objection))
    if sorted(trial.layers) != list(range(count)):
        reason = f"only {len(trial.layers)} of its {count} layers go through transformers' attention interface"
        raise ModelError(refusal(name, reason if trial.layers else NOT_THERE))
    max_len = _max_len(settings, config, name)
    return ModelSpec(
        architecture=name,
        implementation="transformers",
        vocab_size=vocab_size,
        max_len=max_len,
        serve_len=serve_len(max_len, config),
        dtype=dtype,
        layers=[trial.layers[layer] for layer in range(count)],
        num_params=num_params,
        source=source,
        hidden_size=hidden_size,
        kv_dtype=config.kv_dtype,
    )


def load(
    spec: ModelSpec, checkpoint: Checkpoint, device: torch.device, product: Choice, progress: Callable[[float], None]
) -> Transformers:
    """Return the model of a checkpoint's folder with its weights, on the device. Raises ModelError."""
    progress(0.0)
    is_dummy = isinstance(checkpoint, DummyWeights)
    model = _random(spec, checkpoint.folder, device) if is_dummy else _read(spec, checkpoint.folder).to(device)
    loaded = Transformers(spec, model, checkpoint.weights_hash, product)
    swaps = [] if product.kernels is None else loaded.pack(product.kernels)
    try:
        loaded.check_isolation(device)
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        if not swaps or is_out_of_memory(error):
            raise
        reason = first_line(error)
    else:
        progress(1.0)
        return loaded
    # The model's code accesses its linear layers' attributes, which packed layers lack.
    unpack(swaps)
    loaded.saved_bytes = 0
    lost = f"torch computes the products: {spec.architecture} does not run on packed weights ({reason})"
    loaded.product = Choice(None, lost)
    loaded.check_isolation(device)
    progress(1.0)
    return loaded


def _read(spec: ModelSpec, folder: Path) -> Any:
    """Return transformers' model with the weights of a folder. Raises ModelError."""
    with quiet():
        try:
            found: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=spec.dtype,
                attn_implementation=SERVE,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # reported below, like missing ones
                output_loading_info=True,
                # The grouped matmuls of experts do not support float64.
                **({"experts_implementation": "eager"} if spec.dtype == torch.float64 else {}),
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, ImportError) as error:
            raise ModelError(f"transformers cannot load {folder}: {first_line(error)}") from None
    model, info = found
    for key in ("missing_keys", "mismatched_keys"):
        names = sorted(str(item if isinstance(item, str) else item[0]) for item in info.get(key) or ())
        if names:
            what = "lacks the tensor" if key == "missing_keys" else "has another shape than config.json for the tensor"
            raise ModelError(f"the checkpoint in {folder} {what} {names[0]} ({len(names)} in all)")
    _fix_rotary(model, spec.serve_len)
    return model.eval()


def _random(spec: ModelSpec, folder: Path, device: torch.device) -> Any:
    """Return transformers' model with random weights. Raises ModelError."""
    settings = _settings(folder, spec.architecture)
    with quiet(), torch.device(device):
        kind = _class(settings, spec.architecture, dict(spec.source))
        model = kind._from_config(settings, attn_implementation=SERVE, dtype=spec.dtype)
    for name, parameter in model.named_parameters():
        initialize(name, parameter)
    _fix_rotary(model, spec.serve_len)
    return model.eval()


class Transformers:
    """A loaded model that runs transformers' code."""

    def __init__(self, spec: ModelSpec, model: Any, weights_hash: str, product: Choice) -> None:
        self.spec, self.model, self.weights_hash, self.product = spec, model, weights_hash, product
        parameters = list(model.parameters())
        self.num_params = sum(parameter.numel() for parameter in parameters)
        self.weights_bytes = sum(parameter.numel() * parameter.itemsize for parameter in parameters)
        self.saved_bytes = 0
        names = {layer.sinks for layer in spec.layers if layer.sinks is not None}
        self.executors: list[Executor] = []
        self.sinks: Mapping[str, Tensor] = {name: model.get_parameter(name) for name in names}
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(self, forward: Forward) -> Outputs:
        """Run a step, see Model.forward."""
        silence: AbstractContextManager[list[Tensor]] = nullcontext([])
        with silence if forward.hidden_at is None else overheard(self.model) as found:
            logits: Tensor = self.model(
                input_ids=forward.ids[None],
                position_ids=forward.positions[None],
                use_cache=False,
                pequod_step=forward,
                **({"logits_to_keep": forward.logits_at} if self._keeps else {}),
            ).logits[0]
        if not self._keeps:
            logits = logits[forward.logits_at]
        hidden = found[0][0, forward.hidden_at] if found else None
        return Outputs(logits if logits.dtype == torch.float64 else logits.float(), hidden)

    def pack(self, kernels: Kernels) -> list[Swap]:
        """Pack the layers that the kernels support; returns what `unpack` needs to undo it."""
        swaps = pack(self.model, kernels)
        self.saved_bytes = sum(swap.packed.saved_bytes for swap in swaps)
        share = sum(swap.num_bytes for swap in swaps) / self.weights_bytes
        if share > 0.5:  # copy the rest: a view would keep the whole file mapped
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()
        lost = (
            f"our kernels hold {share:.0%} of the weights; what transformers' code computes beside them with torch can"
            " change its last bits with the batch"
        )
        self.product = Choice(kernels, lost, alone=False)
        return swaps

    def check_isolation(self, device: torch.device) -> None:
        """Raise ModelError if a token's logits depend on another sequence's token in the same step."""
        size = 4
        cache = KVCache.allocate(
            Reference(),
            self.spec.layers,
            num_blocks=2,
            block_size=size,
            dtype=self.spec.dtype,
            device=device,
            sinks=self.sinks,
        )
        plan = cache.plan(AttentionMeta.of([([0], 0, 2), ([1], 0, 2)], size, device))
        positions = torch.tensor([0, 1, 0, 1], device=device)
        some, other = (token % self.spec.vocab_size for token in (11, 47))

        def logits(ids: list[int], at: list[int]) -> Tensor:
            step = Forward(positions.new_tensor(ids), positions, plan, cache, positions.new_tensor(at))
            return self.forward(step).logits

        first, second = (logits([*before, some, other], [2, 3]) for before in ((some, other), (other, other)))
        # Equal up to rounding, because experts may be multiplied in other groups.
        if (first - second).abs().max() > 0.05 * first.abs().max():
            raise ModelError(
                refusal(self.spec.architecture, "something other than attention passes from one token to another")
            )
        # Alone and without position ids the model computes positions itself. They must be the same.
        plan_alone = cache.plan(AttentionMeta.of([([0], 0, 2)], size, device))
        ids = positions.new_tensor([some, other])
        alone = Forward(ids, positions[:2], plan_alone, cache, positions[:0])
        with torch.inference_mode():
            own = self.model(input_ids=ids[None], use_cache=False, pequod_step=alone).logits[0, -1]
        again = logits([some, other, some, other], [3])[0]
        rounding = 0.05 if self.spec.dtype.itemsize == 2 else 0.001
        if (again - own).abs().max() > rounding * own.abs().max():
            raise ModelError(refusal(self.spec.architecture, "it counts the positions of tokens in its own way"))


def _check_counts(source: dict[str, Any]) -> None:
    """Raise ModelError if config.json, or an object in it, has a count larger than any model's."""
    for key, value in source.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, int | float) and COUNTS.search(key) and not value <= MAX_LAYERS:
            raise ModelError(f"config.json: {shown(key)} must be at most {MAX_LAYERS}, not {shown(value)}")


def _settings(folder: Path, name: str) -> Any:
    """Return transformers' configuration object. Raises ModelError."""
    with quiet():
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # model classes raise any error for a broken config
            known = f"transformers {transformers.__version__}"
            if "model type" in str(error) or "trust_remote_code" in str(error):
                raise ModelError(f"the architecture {name} is known neither here nor to {known}") from None
            raise ModelError(f"{known} cannot use {folder / 'config.json'}: {first_line(error)}") from None


def _class(settings: Any, name: str, source: dict[str, Any]) -> Any:
    """Return the class that AutoModelForCausalLM would use if config.json names it. Raises ModelError."""
    found = AutoModelForCausalLM._model_mapping.get(type(settings), None)
    kinds = found if isinstance(found, tuple) else (found,)
    names = source.get("architectures") or [kind.__name__ for kind in kinds if kind is not None]
    for kind in kinds:
        if kind is not None and kind.__name__ in names:
            return kind
    # Older checkpoints name the class of their own code. transformers takes that of the model type.
    if any(str(given).endswith("ForCausalLM") for given in names) and kinds[0] is not None:
        return kinds[0]
    raise ModelError(f"{name} is not a causal language model that transformers {transformers.__version__} has")


def _fix_rotary(model: torch.nn.Module, length: int) -> None:
    """Compute length-dependent frequencies once. transformers would recompute them for the longest position of a
    batch."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if not isinstance(kinds, str | dict):
            continue
        by_layer: dict[str | None, str] = {None: kinds} if isinstance(kinds, str) else dict(kinds)
        for layer_type, kind in by_layer.items():
            if kind != "longrope" and "dynamic" not in kind:
                continue
            prefix = "" if layer_type is None else f"{layer_type}_"
            old: Tensor = getattr(module, f"{prefix}inv_freq")
            new, scale = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=length, layer_type=layer_type)
            setattr(module, f"{prefix}inv_freq", new.to(old))
            setattr(module, f"{prefix}attention_scaling", scale)
            by_layer[layer_type] = "default"  # which transformers never recomputes
        module.rope_type = by_layer[None] if isinstance(kinds, str) else by_layer  # type: ignore[assignment]


def _max_len(settings: Any, config: EngineConfig, name: str) -> int:
    length = _length(settings, config, name)
    if not 1 <= length <= MAX_NUMBER:
        raise ModelError(f"config.json is for sequences of {length:.3g} tokens, which no model takes")
    return length


def _length(settings: Any, config: EngineConfig, name: str) -> int:
    text = settings.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
    length = next((value for key in names if isinstance(value := getattr(text, key, None), int)), config.max_len)
    if length is None:
        raise ModelError(f"config.json does not say how long a sequence of {name} may be; set `max_len`")
    rope = getattr(text, "rope_parameters", None) or {}
    factor = rope.get("factor") or 1.0
    if rope.get("rope_type") in ("linear", "dynamic"):
        return int(length * factor)
    if rope.get("rope_type") == "yarn":
        return max(length, int((rope.get("original_max_position_embeddings") or length) * factor))
    return length
