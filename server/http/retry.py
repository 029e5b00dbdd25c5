"""Seconds in Retry-After, by what the client has to wait for."""

from __future__ import annotations

PROBE_S = 2  # /ready: asking again costs nothing
LOADING_S = 5
DRAINING_S = 5  # then the next process listens
ENGINE_S = 5  # a restarted engine
CONNECTIONS_S = 5
GRAMMARS_S = 5
TEMPLATES_S = 5  # a new process for chat templates
STORE_S = 5
FAILED_S = 30  # about the time in which a supervisor restarts the process
# A full server: computed from the backlog and the throughput, see Limits.retry_after.
UNKNOWN_S = 5  # no throughput yet, since no request has finished
MAX_S = 60
