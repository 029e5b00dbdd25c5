"""Attention over a paged KV cache: the interface of its backends, and their selection."""

from .backend import AttentionBackend, LayerCache, Plan
from .cache import KVCache
from .choice import Choice, check, choose, create
from .layer import AttentionLayer
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
]
