"""Runs a transformers model without weights, to find which layers call the attention function, and with what.

The model is on meta tensors. An objection, part of a sentence, is the reason why it cannot be served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

from ..attention import AttentionLayer
from ..types import ModelError
from .checkpoint.weights import Checkpoint

TRIAL = "pequod_trial"  # records its arguments
# Further keyword arguments of attention calls that are handled, or that may be ignored.
KNOWN = {"dropout", "position_ids", "is_causal", "cache_position"}
MAX_PARTS = 1 << 17  # modules and parameters of a model
NOT_THERE = "its layers do not go through that interface, or hand it nothing of what forward is given"


@dataclass(slots=True)
class Trial:
    """A model's attention calls in a trial run, by layer, and the first reason why it cannot be served."""

    layers: dict[int, AttentionLayer] = field(default_factory=dict)
    sinks: dict[int, Tensor] = field(default_factory=dict)  # of the layers that have them
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


def _trial(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    pequod_trial: Trial | None = None,
    scaling: float | Tensor | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
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
    elif isinstance(scaling, Tensor):
        trial.object("the scale of its attention is no constant")
    else:
        trial.layers[layer] = AttentionLayer(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            v_head_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else scaling,
            window=window,
            softcap=softcap,
        )
        if s_aux is not None:
            trial.sinks[layer] = s_aux
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


ALL_ATTENTION_FUNCTIONS.register(TRIAL, _trial)
ALL_MASK_ATTENTION_FUNCTIONS.register(TRIAL, _trial_mask)


def try_without_weights(
    settings: Any, kind: Any, name: str, dtype: torch.dtype, checkpoint: Checkpoint | None = None
) -> Tried:
    """Run two tokens on meta tensors. Raises ModelError."""
    trial, settings = Trial(), deepcopy(settings)
    settings._experts_implementation = "batched_mm"  # the only implementation whose shapes do not depend on values
    try:
        with torch.device("meta"), _bounded(name, checkpoint):
            model = kind._from_config(settings, attn_implementation=TRIAL, dtype=dtype).eval()
            ones = torch.ones(1, 2, dtype=torch.int64)
        with torch.inference_mode(), overheard(model) as hidden:
            logits = model(
                input_ids=ones, attention_mask=ones, position_ids=ones, use_cache=False, pequod_trial=trial
            ).logits
    except ModelError:
        raise
    except Exception as error:  # model classes raise any error if they cannot run on meta tensors
        reason = trial.objection or f"it cannot be tried without weights ({first_line(error)})"
        raise ModelError(refusal(name, reason if trial.layers or trial.objection else NOT_THERE)) from None
    _name_sinks(trial, model)
    return Tried(
        trial,
        vocab_size=logits.shape[-1],
        hidden_size=hidden[0].shape[-1] if hidden else 0,
        num_params=sum(parameter.numel() for parameter in model.parameters()),
    )


def _name_sinks(trial: Trial, model: torch.nn.Module) -> None:
    """Record which of the model's parameters are its layers' sinks."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for layer, sinks in trial.sinks.items():
        name = names.get(id(sinks))
        if name is None:
            trial.object("the sinks of its attention are no parameter")
        trial.layers[layer] = replace(trial.layers[layer], sinks=name)


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


@contextmanager
def overheard(model: Any) -> Iterator[list[Tensor]]:
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


def refusal(name: str, reason: str) -> str:
    return f"{name} cannot be served through transformers' attention interface: {reason}"


def first_line(error: BaseException) -> str:
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
