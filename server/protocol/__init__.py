"""The wire: what each API's requests may hold, and how its answers are written."""
