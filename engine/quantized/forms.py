"""How a GPU stores the weights of quantized checkpoints: the forms beside the blocks of config.py."""

from __future__ import annotations

import torch

from ..models.gpu.form import UNIT, Form
from .config import Scheme


def form_of(scheme: Scheme, columns: int) -> Form | None:
    """Return the form for a weight with this number of columns; None: it must be dequantized."""
    group = 0 if scheme.columns is None or scheme.columns >= columns else scheme.columns
    if group % UNIT:
        return None
    if scheme.is_float and scheme.bits == 4:  # as integers, see layouts.INTEGERS
        return Form(8, group)
    if scheme.is_float:
        return Form(8, group, is_float=True, weights_only=scheme.weights_only)
    return Form(scheme.bits, group, has_zeros=not scheme.symmetric, scale=torch.float16)
