"""Computes a native decoder on a GPU: launches of the Triton kernels in engine/kernels/gpu."""
