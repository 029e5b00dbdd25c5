"""How many seconds a refusal's Retry-After gives, by what the client is to wait for."""

from __future__ import annotations

PROBE_S = 2  # /ready: asking again costs nothing
LOADING_S = 5
DRAINING_S = 5  # whoever comes back finds the next process
ENGINE_S = 5  # a restarted engine
CONNECTIONS_S = 5
GRAMMARS_S = 5
STORE_S = 5
FAILED_S = 30  # a supervisor restarts the process in about that time
# A full server: computed from the backlog and the throughput, see Limits.retry_after.
UNKNOWN_S = 5  # nothing has finished yet, so that there is no throughput to divide by
MAX_S = 60
