"""Quantized safetensors checkpoints: those whose config.json has a `quantization_config`.

`config.py` reads which weights are quantized, and how. `layouts.py` is the table of layouts in which methods store
numbers, scales and zero points. `QuantizedCheckpoint` presents the weights under their plain names: dequantized, or in
the blocks that the kernels compute with.
"""
