"""How a GPU stores the weights of GGUF files: those in Q4_0 and Q8_0 as they are, others converted to Q8_0."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..kernels.blocks import FORMATS, PIECE_NUMBERS, Q8_0, in_q8_0
from ..kernels.matmul import BlockRows
from ..models.gpu.coded import CodedPiece
from ..models.gpu.form import Form
from .reader import PLAIN

FORMS = {"Q4_0": Form(4, 32, scale=torch.float16), "Q8_0": Form(8, 32, scale=torch.float16)}


def stored_type(name: str) -> str:
    """Return the type in which a GPU stores weights of a type."""
    return name if name in FORMS or name in PLAIN else FORMATS[Q8_0].name


def read(part: BlockRows) -> tuple[None, Iterator[CodedPiece]]:
    """Return the rows of a weight in the form of their stored type; their columns are in order."""
    form = FORMATS.get(part.format)
    return None, _pieces(part if form is not None and form.name in FORMS else in_q8_0(part))


def _pieces(part: BlockRows) -> Iterator[CodedPiece]:
    rows = torch.arange(part.shape[0])
    if part.interleaved:
        rows = rows.view(-1, part.interleaved // 2, 2).transpose(1, 2).flatten()
    step = max(1, PIECE_NUMBERS // part.shape[1])
    for start in range(0, len(rows), step):
        blocks = part.data[rows[start : start + step]].unflatten(1, (-1, FORMATS[part.format].block_bytes))
        scales, stored = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1), blocks[..., 2:]
        numbers = stored ^ 0x80 if part.format == Q8_0 else torch.cat((stored & 15, stored >> 4), -1)
        yield CodedPiece(slice(start, start + len(blocks)), numbers.flatten(1), None, scales)
