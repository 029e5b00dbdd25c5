"""Attention over a paged KV cache: the seam that its backends stand behind, and the choice among them."""

from .backend import AttentionBackend, LayerCache, Plan
from .cache import KVCache
from .choice import Choice, check, choose, create
from .layer import AttentionLayer, held
from .metadata import AttentionMeta

__all__ = [
    "AttentionBackend",
    "AttentionLayer",
    "AttentionMeta",
    "Choice",
    "KVCache",
    "LayerCache",
    "Plan",
    "check",
    "choose",
    "create",
    "held",
]
