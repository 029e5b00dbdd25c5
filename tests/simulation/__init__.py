"""Admission, the engine's client and supervisor, and the engine itself in virtual time, under a plan of faults."""
