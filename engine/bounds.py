"""Bounds for the numbers in a config.json or a GGUF file, before they are compared with weights.

They are far above any published model's, yet allow a list with an item per layer, and a weight's size fits 64 bits.
"""

from __future__ import annotations

MAX_LAYERS = 4096
MAX_HEADS = 1 << 16  # also of head_dim
MAX_EXPERTS = 1 << 16  # of all layers
MAX_SIZE = 1 << 24  # of the vocabulary, the hidden state and the feed-forward layer
