"""How many states there are: one for each sequence that runs, and snapshots for cached prefixes (snapshots.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from .config import EngineConfig

if TYPE_CHECKING:
    from .models import ModelSpec

# There is a snapshot for each 1,024 tokens of the KV cache, which is a short chat. If that is fewer than two for each
# sequence that runs, there are two: one at the end of its prompt, and one that moves along with it.
TOKENS, LEAST = 1024, 2
# Part of the memory beside weights and activations that the states of running sequences may have if their number is
# open: a state can take as much as the keys and values of thousands of tokens.
SHARE = 1 / 3


def plan_states(
    spec: ModelSpec, requested: EngineConfig, config: EngineConfig, free: int, *, cache: int, request: int
) -> tuple[EngineConfig, list[str]]:
    """Return the resolved config with a number of snapshots, and what the user should know.

    `free`: the bytes beside weights, activations and a KV cache whose size is set. `cache`: the most bytes of the KV
    cache that are of use; 0: its size is set. `request`: the bytes of keys and values of a request of full length. If
    `requested` leaves the number of sequences open, it is lowered to what the memory holds.
    """
    assert config.max_seqs
    if not spec.state_bytes:
        return structs.replace(config, num_snapshots=0), []
    if config.num_snapshots is not None:
        return config, []
    # A length that the user has set must fit; one that is the model's may be lowered.
    kept = 0 if not cache else request if requested.max_len else min(request, free // 2)
    seqs, notes = config.max_seqs, []
    held = max(0, int(min(SHARE * free, free - kept))) // spec.state_bytes
    if requested.max_seqs is None and held < seqs:
        seqs = max(1, held)
        notes = [f"max_num_seqs lowered from {config.max_seqs} to {seqs}, for whose states there is memory"]
    snapshots = _snapshots(spec, seqs, free - kept - seqs * spec.state_bytes, cache) if config.prefix_caching else 0
    if config.prefix_caching and snapshots < seqs:
        where = f"at the ends of {snapshots} prompts at most" if snapshots else "nowhere"
        notes.append(f"prefixes are cached {where}: there is no memory for more states")
    return structs.replace(config, max_seqs=seqs, num_snapshots=snapshots), notes


def _snapshots(spec: ModelSpec, seqs: int, left: int, cache: int) -> int:
    """Return the number of snapshots; `left`: the bytes that they share with the KV cache, of which they get at most
    half. `cache`: see `plan_states`."""
    # What a window is before needs no memory for long.
    groups = spec.groups
    state, keys = spec.state_bytes, TOKENS * groups.windows.count(None) * groups.block_bytes(1, spec.kv_bytes_per_token)
    left = max(0, left)
    if not cache:
        return min(left // state, LEAST * seqs)
    return min(left // (state + max(state, keys)), max(LEAST * seqs, cache // keys))


def num_states(config: EngineConfig) -> int:
    """Return the number of states of a config that `plan_states` has returned."""
    return (config.max_seqs or 0) + (config.num_snapshots or 0)
