"""Runs models that the native decoder does not support with transformers' code, with attention over the paged cache.

A step's rows are flattened into one sequence of tokens with batch size 1. Attention functions are registered with
transformers under our names, and the step's metadata is passed as a keyword argument through the model's forward to
each layer's attention. Whether a model can be served is not decided by a list of names: a trial run without weights
(meta tensors) shows which layers call the attention function, and with which arguments; a short run with the weights
shows that only attention passes information from one token to another. On a CPU plain linear layers are packed
(packing.py).
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ..attention import AttentionMeta, KVCache, LayerKV, select
from ..config import EngineConfig
from ..files import read_json
from ..kernels.library import Choice, Kernels
from ..types import ModelError
from . import Outputs
from .packing import pack
from .spec import MAX_LAYERS, MAX_NUMBER, MAX_SIZE, ModelSpec, architecture, choose_dtype, serve_len, shown
from .weights import Checkpoint

SERVE = "pequod"  # serves steps; without a mask function of this name, transformers makes no masks
TRIAL = "pequod_trial"  # records its arguments
# Keyword arguments of attention calls that are handled, or that may be ignored.
KNOWN = {"dropout", "scaling", "softcap", "sliding_window", "s_aux", "position_ids", "is_causal", "cache_position"}
# Settings that count parts of a model. transformers makes lists of that length before it creates a model.
COUNTS = re.compile(r"(layer|block|depth|stage|expert|head|group)s?$|_replace$")
MAX_PARTS = 1 << 17  # modules and parameters of a model
NOT_THERE = "its layers do not go through that interface, or hand it nothing of what forward is given"


@dataclass(frozen=True, slots=True)
class Step:
    """The arguments of attention in one step; passed through the model as a keyword argument."""

    meta: AttentionMeta
    cache: KVCache
    windows: tuple[int | None, ...]


@dataclass(slots=True)
class Trial:
    """A model's attention calls in a trial run, by layer, and the first reason why it cannot be served."""

    layers: dict[int, tuple[LayerKV, int | None]] = field(default_factory=dict)
    objection: str | None = None

    def object(self, reason: str) -> None:
        self.objection = self.objection or reason


class Tried(NamedTuple):
    """The result of a trial run."""

    trial: Trial
    vocab_size: int  # width of the logits
    hidden_size: int  # of the last hidden states; 0: not available
    num_params: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Replaces an attention mask in a trial run: the window of the model's mask."""

    window: int | None
    objection: str | None = None


def _serve(
    module: Any,
    query: Tensor,  # [1, heads, tokens, head_dim]; key and value may have other numbers of heads and sizes
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    pequod_step: Step | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention in a step; registered as SERVE."""
    if pequod_step is None:
        raise RuntimeError(f"{type(module).__name__} does not hand keyword arguments on to its attention")
    step, layer = pequod_step, module.layer_idx
    out = step.cache.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        step.meta,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=step.windows[layer],
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def _trial(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    pequod_trial: Trial | None = None,
    sliding_window: int | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Record the layer's arguments and return zeros; registered as TRIAL."""
    out = value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    if pequod_trial is None:
        raise RuntimeError(NOT_THERE)
    trial, layer = pequod_trial, getattr(module, "layer_idx", None)
    unknown = sorted(name for name, value in given.items() if name not in KNOWN and value is not None)
    unknown = [name for name in unknown if not isinstance(given[name], bool)]
    window = sliding_window
    if isinstance(attention_mask, Mask):
        window = attention_mask.window
        if attention_mask.objection:
            trial.object(attention_mask.objection)
    elif attention_mask is not None:
        trial.object("it makes attention masks of its own")
    if unknown:
        trial.object(f"its attention depends on {unknown[0]}")
    elif layer is None or layer in trial.layers:
        trial.object("its attention layers are not numbered")
    elif not getattr(module, "is_causal", True) or given.get("is_causal") is False:
        trial.object("its attention is not causal")
    else:
        trial.layers[layer] = LayerKV(key.shape[1], key.shape[3], value.shape[3]), window
    return out, None


def _trial_mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **_: Any) -> Mask:
    """Return the window of a mask function, which is probed at the edges of the window."""
    far = 3 * (local_size or 1000) + 1  # not a multiple of the size, where a chunked mask would look like a window

    def seen(query: int, key: int) -> bool:
        zero = torch.zeros((), dtype=torch.int64)
        return bool(mask_function(zero, zero, zero + query, zero + key))

    for query in (far, far + 1):
        first = 0 if local_size is None else query - local_size + 1
        within = seen(query, query) and seen(query, first)
        beyond = seen(query, query + 1) or (first > 0 and seen(query, first - 1))
        if beyond or not within:
            return Mask(local_size, "its attention mask is neither causal nor a sliding window")
    return Mask(local_size)


ALL_ATTENTION_FUNCTIONS.register(SERVE, _serve)
ALL_ATTENTION_FUNCTIONS.register(TRIAL, _trial)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRIAL, _trial_mask)


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
        raise ModelError(_refusal(name, "its layers keep a state of their own beside keys and values"))
    dtype = choose_dtype(source, config)
    with quiet():
        trial, vocab_size, hidden_size, num_params = _try(settings, kind, name, dtype, checkpoint)
    if vocab_size > MAX_SIZE:
        raise ModelError(f"config.json asks for {vocab_size} logits, but at most {MAX_SIZE} are served")
    count = settings.get_text_config().num_hidden_layers
    if trial.objection:
        raise ModelError(_refusal(name, trial.objection))
    if sorted(trial.layers) != list(range(count)):
        reason = f"only {len(trial.layers)} of its {count} layers go through transformers' attention interface"
        raise ModelError(_refusal(name, reason if trial.layers else NOT_THERE))
    found = [trial.layers[layer] for layer in range(count)]
    max_len = _max_len(settings, config, name)
    return ModelSpec(
        architecture=name,
        implementation="transformers",
        vocab_size=vocab_size,
        max_len=max_len,
        serve_len=serve_len(max_len, config),
        dtype=dtype,
        layers=[layer for layer, _ in found],
        windows=tuple(window for _, window in found),
        num_params=num_params,
        source=source,
        hidden_size=hidden_size,
        int8_cache=config.kv_dtype == "int8",
    )


def load(
    spec: ModelSpec, folder: Path, device: torch.device, product: Choice, progress: Callable[[float], None]
) -> Transformers:
    """Return the model of a folder with its weights, on the device. Raises ModelError."""
    checkpoint = Checkpoint(folder)
    progress(0.0)
    loaded = Transformers(spec, _read(spec, folder).to(device), checkpoint.weights_hash, product)
    try:
        loaded.check_isolation(device)
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        if product.kernels is None or "can't allocate memory" in str(error):
            raise
        reason = _first_line(error)
    else:
        progress(1.0)
        return loaded
    # The model's code accesses its linear layers' attributes, which packed layers lack.
    del loaded
    lost = f"torch computes the products: {spec.architecture} does not run on packed weights ({reason})"
    return load(spec, folder, device, Choice(None, lost), progress)


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
            raise ModelError(f"transformers cannot load {folder}: {_first_line(error)}") from None
    model, info = found
    for key in ("missing_keys", "mismatched_keys"):
        names = sorted(str(item if isinstance(item, str) else item[0]) for item in info.get(key) or ())
        if names:
            what = "lacks the tensor" if key == "missing_keys" else "has another shape than config.json for the tensor"
            raise ModelError(f"the checkpoint in {folder} {what} {names[0]} ({len(names)} in all)")
    _fix_rotary(model, spec.serve_len)
    return model.eval()


class Transformers:
    """A loaded model that runs transformers' code."""

    def __init__(self, spec: ModelSpec, model: Any, weights_hash: str, product: Choice) -> None:
        self.spec, self.model, self.weights_hash = spec, model, weights_hash
        parameters = list(model.parameters())
        self.num_params = sum(parameter.numel() for parameter in parameters)
        self.weights_bytes = sum(parameter.numel() * parameter.itemsize for parameter in parameters)
        del parameters  # what is packed is freed
        self.product = product if product.kernels is None else self._pack(product.kernels)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        meta: AttentionMeta,
        cache: KVCache,
        logits_at: Tensor,
        *,
        hidden_at: Tensor | None = None,
    ) -> Outputs:
        """Run a step, see Model.forward."""
        silence: AbstractContextManager[list[Tensor]] = nullcontext([])
        with silence if hidden_at is None else captured(self.model) as found:
            logits: Tensor = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                pequod_step=Step(meta, cache, self.spec.windows),
                **({"logits_to_keep": logits_at} if self._keeps else {}),
            ).logits[0]
        if not self._keeps:
            logits = logits[logits_at]
        hidden = found[0][0, hidden_at] if found else None
        return Outputs(logits if logits.dtype == torch.float64 else logits.float(), hidden)

    def _pack(self, kernels: Kernels) -> Choice:
        """Pack the layers that the kernels support; returns what computes the matmuls from then on."""
        share = pack(self.model, kernels) / self.weights_bytes
        if share > 0.5:  # copy the rest: a view would keep the whole file mapped
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()
        lost = (
            f"our kernels hold {share:.0%} of the weights; what transformers' code computes beside them with torch can"
            " change its last bits with the batch"
        )
        return Choice(kernels, lost, alone=False)

    def check_isolation(self, device: torch.device) -> None:
        """Raise ModelError if a token's logits depend on another sequence's token in the same step."""
        size = 4
        backend = select("reference")
        cache = KVCache.allocate(
            backend, self.spec.layers, num_blocks=2, block_size=size, dtype=self.spec.dtype, device=device
        )
        meta = AttentionMeta.of([([0], 0, 2), ([1], 0, 2)], size, device)
        positions = torch.tensor([0, 1, 0, 1], device=device)
        some, other = (token % self.spec.vocab_size for token in (11, 47))
        first, second = (
            self.forward(
                torch.tensor([*before, some, other], device=device),
                positions,
                meta,
                cache,
                positions.new_tensor([2, 3]),
            ).logits
            for before in ((some, other), (other, other))
        )
        # Equal up to rounding, because experts may be multiplied in other groups.
        if (first - second).abs().max() > 0.05 * first.abs().max():
            raise ModelError(
                _refusal(self.spec.architecture, "something other than attention passes from one token to another")
            )
        # Alone and without position ids the model computes positions itself. They must be the same.
        alone = AttentionMeta.of([([0], 0, 2)], size, device)
        with torch.inference_mode():
            own = self.model(
                input_ids=torch.tensor([[some, other]], device=device),
                use_cache=False,
                pequod_step=Step(alone, cache, self.spec.windows),
            ).logits[0, -1]
        again = self.forward(
            torch.tensor([some, other, some, other], device=device), positions, meta, cache, positions.new_tensor([3])
        ).logits[0]
        rounding = 0.05 if self.spec.dtype.itemsize == 2 else 0.001
        if (again - own).abs().max() > rounding * own.abs().max():
            raise ModelError(_refusal(self.spec.architecture, "it counts the positions of tokens in its own way"))


@contextmanager
def captured(model: Any) -> Iterator[list[Tensor]]:
    """Capture the last hidden states that a model passes to its head while it runs, [1, tokens, hidden].

    A hook is needed because the model returns only logits, and because heads may scale or cap them. The list stays
    empty if the model has no separate head.
    """
    found: list[Tensor] = []

    def capture(_: Any, __: Any, output: Any) -> None:
        states = getattr(output, "last_hidden_state", None)
        if isinstance(states, Tensor) and states.dim() == 3:
            found.append(states)

    body = model.get_decoder()
    if body is model:
        yield found
        return
    hook = body.register_forward_hook(capture)
    try:
        yield found
    finally:
        hook.remove()


def _check_counts(source: dict[str, Any]) -> None:
    """Raise ModelError if config.json, or an object in it, has a count larger than any model's."""
    for key, value in source.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, int | float) and COUNTS.search(key) and not value <= MAX_LAYERS:
            raise ModelError(f"config.json: {shown(key)} must be at most {MAX_LAYERS}, not {shown(value)}")


@contextmanager
def _bounded(name: str, checkpoint: Checkpoint | None) -> Iterator[None]:
    """While a model is created, raise ModelError as soon as it is much larger than its checkpoint.

    transformers would allocate tensors that the checkpoint lacks before it reports them as missing.
    """
    # One tensor of a checkpoint may become several parts of a model, and tied weights are counted up to three times.
    max_parts = MAX_PARTS if checkpoint is None else min(MAX_PARTS, 16 * len(checkpoint.entries) + 1024)
    max_numbers = math.inf if checkpoint is None else 4 * checkpoint.num_numbers
    parts = numbers = 0

    def count(_: Any, __: Any, part: Any) -> None:
        nonlocal parts, numbers
        parts += 1
        if isinstance(part, Tensor):
            numbers += part.numel()
        if parts > max_parts or numbers > max_numbers:
            raise ModelError(f"config.json is for {name} with far more, or far larger, layers than the checkpoint has")

    hooks = [register_module_module_registration_hook(count), register_module_parameter_registration_hook(count)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _settings(folder: Path, name: str) -> Any:
    """Return transformers' configuration object. Raises ModelError."""
    with quiet():
        try:
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # model classes raise any error for a broken config
            known = f"transformers {transformers.__version__}"
            if "model type" in str(error) or "trust_remote_code" in str(error):
                raise ModelError(f"the architecture {name} is known neither here nor to {known}") from None
            raise ModelError(f"{known} cannot use {folder / 'config.json'}: {_first_line(error)}") from None


def _class(settings: Any, name: str, source: dict[str, Any]) -> Any:
    """Return the class that AutoModelForCausalLM would use if config.json names it. Raises ModelError."""
    found = AutoModelForCausalLM._model_mapping.get(type(settings), None)
    kinds = found if isinstance(found, tuple) else (found,)
    wanted = source.get("architectures") or [kind.__name__ for kind in kinds if kind is not None]
    for kind in kinds:
        if kind is not None and kind.__name__ in wanted:
            return kind
    raise ModelError(f"{name} is not a causal language model that transformers {transformers.__version__} has")


def _try(settings: Any, kind: Any, name: str, dtype: torch.dtype, checkpoint: Checkpoint | None = None) -> Tried:
    """Run two tokens on meta tensors. Raises ModelError."""
    trial, settings = Trial(), deepcopy(settings)
    settings._experts_implementation = "batched_mm"  # the only implementation whose shapes do not depend on values
    try:
        with torch.device("meta"), _bounded(name, checkpoint):
            model = kind._from_config(settings, attn_implementation=TRIAL, dtype=dtype).eval()
            ones = torch.ones(1, 2, dtype=torch.int64)
        with torch.inference_mode(), captured(model) as hidden:
            logits = model(
                input_ids=ones, attention_mask=ones, position_ids=ones, use_cache=False, pequod_trial=trial
            ).logits
    except ModelError:
        raise
    except Exception as error:  # model classes raise any error if they cannot run on meta tensors
        reason = trial.objection or f"it cannot be tried without weights ({_first_line(error)})"
        raise ModelError(_refusal(name, reason if trial.layers or trial.objection else NOT_THERE)) from None
    return Tried(
        trial,
        vocab_size=logits.shape[-1],
        hidden_size=hidden[0].shape[-1] if hidden else 0,
        num_params=sum(parameter.numel() for parameter in model.parameters()),
    )


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
        raise ModelError(f"config.json does not tell how long a sequence {name} takes; set --max-model-len")
    rope = getattr(text, "rope_parameters", None) or {}
    factor = rope.get("factor") or 1.0
    if rope.get("rope_type") in ("linear", "dynamic"):
        return int(length * factor)
    if rope.get("rope_type") == "yarn":
        return max(length, int((rope.get("original_max_position_embeddings") or length) * factor))
    return length


def _refusal(name: str, reason: str) -> str:
    return f"{name} cannot be served through transformers' attention interface: {reason}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).strip().rstrip(".")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
