"""Coding agents, as npm installs them, against Pequod."""
