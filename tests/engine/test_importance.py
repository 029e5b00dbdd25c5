"""The importance of columns, by which int4 rounds: estimated from other weights, alike from files and from memory."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from engine.kernels.library import choose
from engine.kernels.matmul import Quantized, Stored
from engine.models import precision
from engine.models.checkpoint.weights import Checkpoint
from engine.models.importance import PIECE_NUMBERS, after_gate, after_norm, of_hidden
from engine.models.norms import RMSNorm
from engine.types import ModelError
from tests.engine.test_models import CPU
from tests.engine.test_quantization import load
from tests.models import make


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_columns_after_a_norm_count_by_its_weight_and_by_the_hidden_state():
    norm, hidden = RMSNorm(3, 1e-6, torch.float32, CPU), torch.tensor([0.5, 1.0, 1.5])
    norm.weight.copy_(torch.tensor([2.0, -1.0, 3.0]))
    assert after_norm(norm, hidden).tolist() == [2.0, 1.0, 13.5]
    assert after_norm(norm, None).tolist() == [4.0, 1.0, 9.0]
    assert after_norm(None, hidden).tolist() == hidden.tolist()
    assert after_norm(None, None) is None


def test_the_hidden_state_counts_by_the_squares_of_the_embedding():
    assert of_hidden(torch.tensor([[1.0, 1.0], [1.0, 3.0]])).tolist() == pytest.approx([1 / 3, 5 / 3])
    assert of_hidden(torch.zeros(2, 2)).tolist() == [1.0, 1.0]


def test_columns_after_a_gate_count_by_the_rows_of_gate_and_up():
    gate, up, columns = torch.randn(6, 4), torch.randn(6, 4), torch.rand(4)
    squares = (gate.square() @ columns) * (up.square() @ columns)
    weight = torch.cat([gate, up])
    found = after_gate([weight], columns)
    assert torch.equal(weight, torch.cat([gate, up]))
    assert torch.allclose(found / found.sum(), squares / squares.sum())
    assert torch.allclose(after_gate([gate, up], columns), found)


def test_a_gate_of_zeros_nan_or_infinity_leaves_all_columns_alike():
    assert after_gate([torch.zeros(4, 2)], None).tolist() == [1.0, 1.0]
    assert after_gate([torch.full((4, 2), torch.nan)], None).tolist() == [1.0, 1.0]
    one_row = torch.tensor([[1.0, 2.0], [torch.inf, 1.0], [1.0, 1.0], [3.0, 1.0]])
    assert after_gate([one_row], None).tolist() == [1.0, 1.0]


def test_files_memory_and_any_number_of_threads_have_the_same_bits(tmp_path, threads):
    rows, columns = 2 * PIECE_NUMBERS // 128 + 6, 128
    weight, importance = torch.randn(rows, columns).bfloat16(), torch.rand(columns)
    save_file({"a": weight[:5], "b": weight[5:].contiguous()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    found = []
    for count in (1, 2, 3):
        threads(count)
        parts = checkpoint.stored(["a", "b"], torch.bfloat16)
        assert all(isinstance(part, Stored) for part in parts)
        found += [after_gate([weight], importance), after_gate(parts, importance)]
    checkpoint.close()
    assert all(torch.equal(each, found[0]) for each in found)


def test_the_first_rows_of_a_tensor_are_read(tmp_path):
    weight = torch.arange(12.0).view(4, 3)
    save_file({"a": torch.ones(7), "weight": weight}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.rows("weight", 2), weight[:2])
    assert torch.equal(checkpoint.rows("weight", 9), weight)
    checkpoint.close()


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    save_file({"weight": torch.ones(64, 64)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    parts = checkpoint.stored(["weight"], torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"), checkpoint.reading():
        after_gate(parts, None)
    checkpoint.close()


def test_an_error_that_is_not_of_these_files_passes(tmp_path):
    save_file({"weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError), checkpoint.reading():
        (tmp_path / "compiler").read_bytes()
    checkpoint.close()


@pytest.mark.parametrize(("name", "bits"), [("qwen3-tied", 5), ("qwen3-tied", 4), ("mixtral", 5)])
def test_down_projections_are_rounded_by_the_importance_of_their_columns(tmp_path, monkeypatch, name, bits):
    monkeypatch.setattr(precision, "SMALL", 400_000_000 if bits == 5 else 0)
    kernels = choose("auto", CPU, torch.bfloat16, quantized=True).kernels
    if kernels is None:
        pytest.skip("no kernels here")
    folder = make(name, tmp_path, dtype=torch.bfloat16)
    # In bfloat16 torch packs weights, where the processor multiplies it.
    plain, model = load(folder, "float32", cpu_isa="torch"), load(folder, "bfloat16", quantization="int4")
    hidden = of_hidden(plain.embedding.weight)
    layers = list(zip(plain.layers, model.layers, strict=True))
    for layer, rounded in layers[:-1]:  # the last one has 8 bits
        pairs = [(layer.gate_up, layer.down, rounded.down)] if layer.experts is None else []
        if layer.experts is not None and rounded.experts is not None:
            pairs = list(zip(layer.experts.gate_ups, layer.experts.downs, rounded.experts.downs, strict=True))
        for gate_up, down, packed in pairs:
            importance = after_gate([gate_up.weight], after_norm(layer.mlp_norm, hidden))
            ids = torch.arange(len(down.weight))
            want = Quantized(kernels, down.weight.bfloat16(), bits=bits, importance=importance).lookup(ids)
            alike = Quantized(kernels, down.weight.bfloat16(), bits=bits).lookup(ids)
            assert torch.equal(packed.rows(ids), want) and not torch.equal(want, alike)
