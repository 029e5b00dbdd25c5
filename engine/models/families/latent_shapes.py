"""What a config.json says of multi-head latent attention (MLA), from DeepSeek-V2 (arXiv 2405.04434)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...bounds import MAX_HEADS
from ...types import ModelError
from ..rope import Rope
from .keys import whole

MAX_RANK = 1 << 13  # of the projections of low rank


class LatentShape(NamedTuple):
    """The sizes of a layer, whose keys and values are projections of one vector per token: the latent.

    The cache has the latents instead, and one more part of the keys, which is rotated and which all heads share. A
    head's projection of the latents to keys is applied to its queries, and that to values to what it attends to; so
    attention has one KV head, whose keys are a latent and the rotated part, and whose values are the latents.
    """

    heads: int
    query_rank: int  # of the projections of queries; 0: they are one projection
    rank: int  # numbers of a latent
    plain: int  # numbers of a head's queries and keys that are not rotated
    rotated: int  # and of those that are
    value: int  # numbers of a head's values
    in_two: bool = False  # checkpoints have the projections of latents to keys and to values as two tensors

    @property
    def key(self) -> int:
        """The numbers of a key in the cache."""
        return self.rank + self.rotated

    @property
    def queries(self) -> int:
        """The numbers of a token's queries."""
        return self.heads * (self.plain + self.rotated)

    @property
    def rows(self) -> tuple[int, int, int]:
        """The rows of the projections before attention: of queries, and of the latent and the rotated part of keys."""
        return self.query_rank or self.queries, self.key, 0

    @property
    def seen(self) -> int:
        """The numbers of a token that the output projection multiplies."""
        return self.heads * self.value

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the projections before attention and after it, in checkpoints."""
        queries = "self_attn.q_a_proj" if self.query_rank else "self_attn.q_proj"
        return queries, "self_attn.kv_a_proj_with_mqa", "self_attn.o_proj"

    @property
    def head_names(self) -> tuple[str, ...]:
        """The names of the projections of latents to each head's keys and values."""
        return ("self_attn.k_b_proj", "self_attn.v_b_proj") if self.in_two else ("self_attn.kv_b_proj",)

    @property
    def head_numbers(self) -> int:
        """The numbers of these projections."""
        return self.heads * (self.plain + self.value) * self.rank

    @property
    def others(self) -> int:
        """The number of a layer's weights beside its other projections."""
        return self.head_numbers + self.rank + self.query_rank


def read(source: Mapping[str, Any], defaults: Mapping[str, int], heads: int, *, in_two: bool) -> LatentShape:
    """Return the sizes of a model's layers. `defaults`: of the keys of config.json."""

    def size(key: str, maximum: int) -> int:
        return whole(source, key, defaults.get(key), maximum=maximum)

    hidden = whole(source, "hidden_size")
    has_two_ranks = source.get("q_lora_rank", defaults.get("q_lora_rank")) is not None
    rotated = size("qk_rope_head_dim", MAX_HEADS)
    if rotated % 2:
        raise ModelError(f"config.json: qk_rope_head_dim must be even for rotary embeddings, not {rotated}")
    return LatentShape(
        heads=heads,
        query_rank=size("q_lora_rank", MAX_RANK) if has_two_ranks else 0,
        rank=size("kv_lora_rank", MAX_RANK),
        plain=size("qk_nope_head_dim", MAX_HEADS),
        rotated=rotated,
        value=whole(source, "v_head_dim", defaults.get("v_head_dim", max(1, hidden // heads)), maximum=MAX_HEADS),
        in_two=in_two,
    )


def scale(shape: LatentShape, rope: Rope) -> float:
    """Return the scale of the scores: it grows with the factor by which YaRN stretches the rotary embedding."""
    found: float = (shape.plain + shape.rotated) ** -0.5
    if rope.scaling == "default" or not rope.mscale_all_dim or rope.factor is None or rope.factor <= 1:
        return found
    return found * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
