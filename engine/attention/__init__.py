"""Attention over a paged KV cache: the seam that its backends stand behind, and the choice among them."""

from .backend import Attention
from .cache import KVCache
from .choice import Choice, check, choose, select
from .layer import LayerKV, held
from .metadata import AttentionMeta

__all__ = ["Attention", "AttentionMeta", "Choice", "KVCache", "LayerKV", "check", "choose", "held", "select"]
