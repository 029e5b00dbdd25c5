"""Reads the tensors of a model folder, in the forms in which checkpoints store them."""
