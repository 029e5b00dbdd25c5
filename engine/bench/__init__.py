"""Programs that measure the engine's parts by themselves; no module of a running engine imports them.

`python -m engine.bench.kernels` times products, attention and sampling, `python -m engine.bench.roofline` what the
machine could do at best.
"""
