"""Causal convolutions over the last tokens of a sequence, each channel by itself, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def convolve(line: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the convolution of each token's channels with those of the tokens before: [..., tokens, channels].

    line: [..., taps - 1 + tokens, channels], the window before the tokens, and the tokens. taps: [channels, 1, taps],
    the oldest token first. The sums are float32 (float64 for numbers of that type), in the order of the taps, and
    rounded.
    """
    count = taps.shape[-1]
    tokens = line.shape[-2] - (count - 1)
    work = torch.float64 if line.dtype == torch.float64 else torch.float32
    total = torch.zeros(*line.shape[:-2], tokens, line.shape[-1], dtype=work, device=line.device)
    for tap in range(count):
        total = total + line[..., tap : tap + tokens, :].to(work) * taps[:, 0, tap].to(work)
    return (total if bias is None else total + bias.to(work)).to(line.dtype)
