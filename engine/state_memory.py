"""How many states of linear attention there are: one for each sequence that runs, and snapshots for cached prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from .config import EngineConfig

if TYPE_CHECKING:
    from .models import ModelSpec

# For each sequence that runs: one at the end of its prompt, and one on the way, where others branch off or its output
# has come to.
SNAPSHOTS = 2
# Part of the memory beside weights and activations that states may have: a state takes as much as the keys and values
# of hundreds of tokens.
SHARE = 0.5


def with_snapshots(
    spec: ModelSpec, requested: EngineConfig, config: EngineConfig, free: int
) -> tuple[EngineConfig, list[str]]:
    """Return the resolved config with a number of snapshots, and what the user should know.

    `free`: the bytes that states and the KV cache share. If `requested` leaves the number of sequences open, it is
    lowered to what the memory holds.
    """
    assert config.max_seqs
    if not spec.state_bytes:
        return structs.replace(config, num_snapshots=0), []
    if config.num_snapshots is not None:
        return config, []
    held, seqs, notes = max(0, int(SHARE * free)) // spec.state_bytes, config.max_seqs, []
    if requested.max_seqs is None and held < seqs:
        seqs = max(1, held)
        notes = [f"max_num_seqs lowered from {config.max_seqs} to {seqs}, for whose states there is memory"]
    snapshots = max(0, min(SNAPSHOTS * seqs, held - seqs)) if config.prefix_caching else 0
    return structs.replace(config, max_seqs=seqs, num_snapshots=snapshots), notes


def num_states(config: EngineConfig) -> int:
    """Return the number of states of a config that `with_snapshots` has returned."""
    return (config.max_seqs or 0) + (config.num_snapshots or 0)
