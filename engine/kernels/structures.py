"""The structures that Python passes to the kernels, with the same fields in the same order as structures.h."""

from __future__ import annotations

import ctypes


class Gate(ctypes.Structure):
    """How gate and up become one number."""

    _fields_ = [("activation", ctypes.c_int32), ("limit", ctypes.c_float), ("alpha", ctypes.c_float)]


class Matrix(ctypes.Structure):
    """A packed weight."""

    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("num_panels", ctypes.c_int64),
        ("gated", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("planes", ctypes.c_int32),
        ("gate", Gate),
        ("scale", ctypes.c_float),
    ]


class WeightPart(ctypes.Structure):
    """Rows of a plain weight."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("file", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
    ]


class Progress(ctypes.Structure):
    """The progress of packing, and the error that stopped it."""

    _fields_ = [("num_bytes", ctypes.c_int64), ("error", ctypes.c_int32), ("wrong", ctypes.c_int32)]


class PlainWeight(ctypes.Structure):
    """A plain weight, and the memory to pack it into."""

    _fields_ = [
        ("parts", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("num_parts", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("number_bytes", ctypes.c_int64),
        ("num_panels", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("format", ctypes.c_int32),
    ]


class Call(ctypes.Structure):
    """The arguments of attention: the step's rows and the layer's shape."""

    _fields_ = [
        ("query_start", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("v_head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("block_bytes", ctypes.c_int64),
        ("q_token", ctypes.c_int64),
        ("q_head", ctypes.c_int64),
        ("k_token", ctypes.c_int64),
        ("k_head", ctypes.c_int64),
        ("v_token", ctypes.c_int64),
        ("v_head", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class Multiplied(ctypes.Structure):
    """A matmul kernel and the weight that it multiplies by."""

    _fields_ = [("multiply", ctypes.c_void_p), ("matrix", ctypes.c_void_p)]


class Joined(ctypes.Structure):
    """Matmuls of the same x whose results are columns of one y."""

    _fields_ = [("parts", ctypes.c_void_p), ("offsets", ctypes.c_void_p), ("count", ctypes.c_int64)]


class Mixture(ctypes.Structure):
    """A mixture of experts."""

    _fields_ = [
        ("gate_ups", ctypes.c_void_p),
        ("downs", ctypes.c_void_p),
        ("router", Multiplied),
        ("shared_gate_up", Multiplied),
        ("shared_down", Multiplied),
        ("shared_gate", Multiplied),
        ("correction", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("active", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("kept", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("shared", ctypes.c_int64),
        ("sigmoid", ctypes.c_int32),
        ("normalized", ctypes.c_int32),
        ("wide_router", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("epsilon", ctypes.c_float),
    ]


class Layer(ctypes.Structure):
    """A layer of a decoder."""

    _fields_ = [
        ("qkv", Multiplied),
        ("output", Multiplied),
        ("gate_up", Multiplied),
        ("down", Multiplied),
        ("experts", ctypes.c_void_p),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("call", ctypes.c_int64),
        ("turn", ctypes.c_int64),
    ]


class Stack(ctypes.Structure):
    """All layers of a decoder, and the step to compute."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("turned", ctypes.c_int64),
        ("attend", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("threads", ctypes.c_int32),
        ("tokens", ctypes.c_int64),
        ("num_angles", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("angles", ctypes.c_void_p),
        ("calls", ctypes.c_void_p),
        ("caches", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("normed", ctypes.c_void_p),
        ("line", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("inner", ctypes.c_void_p),
    ]


class Delta(ctypes.Structure):
    """A layer of linear attention or of Mamba2, and a step to compute."""

    _fields_ = [
        ("row_start", ctypes.c_void_p),
        ("begin", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("conv_bias", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("windows", ctypes.c_void_p),
        ("matrices", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("segments", ctypes.c_int64),
        ("states", ctypes.c_int64),
        ("key_heads", ctypes.c_int64),
        ("value_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("taps", ctypes.c_int64),
        ("window_stride", ctypes.c_int64),
        ("matrix_stride", ctypes.c_int64),
        ("qkvz_stride", ctypes.c_int64),
        ("gates_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("is_tiled", ctypes.c_int32),
        ("least", ctypes.c_float),
        ("most", ctypes.c_float),
    ]


# In the order of `pequod_sizes` in machine.cpp.
STRUCTURES = (Matrix, WeightPart, Progress, PlainWeight, Multiplied, Joined, Call, Mixture, Layer, Stack, Delta)


def check(library: ctypes.CDLL) -> None:
    """Raise ValueError if the library's structures have other sizes than these."""
    sizes = [*(ctypes.c_int64 * len(STRUCTURES)).in_dll(library, "pequod_sizes")]
    for kind, size in zip(STRUCTURES, sizes, strict=True):
        if ctypes.sizeof(kind) != size:
            raise ValueError(f"{kind.__name__} has {size} bytes in the library and {ctypes.sizeof(kind)} here")
