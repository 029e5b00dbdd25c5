"""transformers models with packed linear layers; transformers' own tokens are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine import EngineConfig, LocalEngine
from engine.kernels.library import choose
from engine.models import hf
from engine.models.packing import PackedEmbedding, PackedLinear, pack, unpack
from tests.engine.test_models import Bench
from tests.models import FALLBACK, load_model, make, oracle, prompt

CPU = torch.device("cpu")
KERNELS = choose("auto", CPU, torch.float32).kernels
pytestmark = pytest.mark.skipif(KERNELS is None, reason="there are no CPU kernels here")
NEW_TOKENS = 10
# Their embedding is scaled by a class of its own, and is the head too.
OWN_EMBEDDING = ("gemma2", "gemma3_text")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("packing")


def load(folder, dtype: str, isa: str = "auto"):
    return load_model(
        EngineConfig(implementation="transformers", model=str(folder), device="cpu", dtype=dtype, cpu_isa=isa), folder
    )


def left(model) -> list[str]:
    return [name for name, module in model.model.named_modules() if type(module) in (nn.Linear, Conv1D)]


def continued(reference, ids: list[int]) -> tuple[list[int], float]:
    """Return transformers' greedy tokens, and the smallest margin of a token's logit, relative to the largest logit."""
    ids, margin = list(ids), 1.0
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids]), use_cache=False).logits[0, -1]
        best, second = logits.topk(2).values.tolist()
        margin = min(margin, (best - second) / logits.abs().max().item())
        ids.append(int(logits.argmax()))
    return ids, margin


@pytest.mark.parametrize("name", sorted({*FALLBACK, *OWN_EMBEDDING}))
def test_greedy_tokens_equal_transformers_in_float32(home, name):
    folder = make(name, home / name)
    model, reference = load(folder, "float32"), oracle(folder, torch.float32)
    assert model.product.name == KERNELS.isa
    assert left(model) == (["lm_head"] if name in OWN_EMBEDDING else [])
    # Decided tokens alone: where two logits are within a rounding, either is right.
    wanted = [found for seed in range(4) if (found := continued(reference, prompt(5 + 11 * seed, seed)))[1] > 1e-4]
    assert len(wanted) >= 3
    bench = Bench(model)
    ids = {seq: tokens[:-NEW_TOKENS] for seq, (tokens, _) in enumerate(wanted)}
    feed = dict(ids)
    for _ in range(NEW_TOKENS):
        chosen = {seq: int(row.argmax()) for seq, row in bench.step(feed, last_only=True).items()}
        feed = {seq: [token] for seq, token in chosen.items()}
        ids = {seq: [*ids[seq], token] for seq, token in chosen.items()}
    assert list(ids.values()) == [tokens for tokens, _ in wanted]


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "gemma3_text"])
def test_bfloat16_is_as_near_as_torchs_own_product(home, name):
    folder = make(name, home / name)
    want = Bench(load(folder, "float32")).step({0: prompt(40)})[0]
    packed, plain = (Bench(load(folder, "bfloat16", isa)).step({0: prompt(40)})[0] for isa in ("auto", "torch"))
    assert (packed - want).norm() < 1.2 * (plain - want).norm() < 0.1 * want.norm()


@pytest.mark.parametrize("name", ["gpt2", "phi3"])
def test_packed_weights_are_held_once(home, name):
    model = load(make(name, home / name), "float32")
    packed = {id(module._packed): module._packed for module in model.model.modules() if hasattr(module, "_packed")}
    held = sum(each.outputs * each.columns * 4 for each in packed.values())
    rest = sum(parameter.numel() * 4 for parameter in model.model.parameters() if parameter.dim() == 2)
    norms = sum(parameter.numel() * 4 for parameter in model.model.parameters() if parameter.dim() == 1)
    biases = 0 if name == "phi3" else 3 * (3 * 64 + 64 + 4 * 64 + 64) * 4  # each packed with its weight
    assert held + rest + norms + biases == model.weights_bytes
    # What is left of gpt2's matrices: the positions; its embedding is its head. Of phi3's: the embedding.
    assert rest == (256 if name == "gpt2" else 300) * 64 * 4


async def test_a_model_of_transformers_does_not_claim_exactness(home):
    folder = make("gpt_neox", home / "gpt_neox")
    async with LocalEngine(EngineConfig(model=str(folder), device="cpu", dtype="float32", num_blocks=32)) as engine:
        told = engine.info
    assert told.product == KERNELS.isa
    assert not told.exact
    assert "can change its last bits with the batch" in told.product_note


def test_what_does_not_run_packed_runs_on_torch(home, monkeypatch):
    """Its weights are put back from their packed form, not read again."""
    reads = []
    read = hf._read
    monkeypatch.setattr(hf, "_read", lambda *given: reads.append(given) or read(*given))

    def breaking(model, kernels):
        packed = pack(model, kernels)
        model.lm_head.forward = lambda x: x @ model.lm_head.weight.T
        return packed

    folder = make("phi3", home / "phi3")
    plain = load(folder, "float32", isa="torch")
    monkeypatch.setattr(hf, "pack", breaking)
    reads.clear()
    model = load(folder, "float32")
    assert len(reads) == 1
    assert model.product.kernels is None
    assert "Phi3ForCausalLM does not run on packed weights (" in model.product.note
    assert model.num_params == plain.num_params
    weights = dict(model.model.named_parameters())
    assert weights.keys() == dict(plain.model.named_parameters()).keys()
    assert all(torch.equal(weights[name], weight) for name, weight in plain.model.named_parameters())
    # The same products on the same numbers, but not always the same bits: those depend on where numbers lie.
    logits, want = (Bench(each).step({0: prompt(9)})[0] for each in (model, plain))
    assert torch.allclose(logits, want, atol=1e-5)


class Net(nn.Module):
    """A model with every kind of linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 13)
        self.odd = nn.Linear(13, 29)
        self.conv = Conv1D(13, 29)
        self.twice = nn.ModuleList([nn.Linear(13, 13, bias=False)] * 2)
        self.sub = Sub(13, 13)
        self.hooked = nn.Linear(13, 13)
        self.hooked.register_forward_hook(lambda *_: None)
        self.before = nn.Linear(13, 13)
        self.before.register_forward_pre_hook(lambda *_: None)
        self.replaced = nn.Linear(13, 13)
        self.replaced.forward = self.replaced.forward
        self.parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(13, 13))
        self.wide = nn.Linear(13, 13).double()
        self.first, self.second = nn.Linear(13, 13), nn.Linear(13, 13)
        self.second.weight = self.first.weight
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.odd(self.embed(ids)))
        for layer in (*self.twice, self.sub, self.hooked, self.before, self.replaced, self.parametrized):
            x = layer(x)
        x = self.wide(x.double()).float()
        return self.head(self.second(self.first(x)))


class Sub(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


@torch.inference_mode()
def test_only_plain_layers_are_packed_and_any_shape_runs():
    torch.manual_seed(1)
    net = Net()
    ids = [torch.randint(0, 37, shape) for shape in ((7,), (1, 1), (2, 3, 5), (1, 0))]
    want = [net(each) for each in ids]
    plain = (net.odd, net.conv, net.twice[0], net.head)
    sizes = sum(module.weight.numel() * 4 for module in plain)
    weights = {name: weight.clone() for name, weight in net.state_dict().items()}
    swaps = pack(net, KERNELS)
    assert sum(swap.num_bytes for swap in swaps) == sizes
    assert {name for name, module in net.named_modules() if isinstance(module, PackedLinear)} == {
        "odd", "conv", "twice.0", "head",
    }  # fmt: skip
    assert net.twice[0] is net.twice[1]
    assert isinstance(net.embed, PackedEmbedding)
    for each, logits in zip(ids, want, strict=True):
        assert net(each).shape == logits.shape
        assert torch.allclose(net(each), logits, atol=1e-5)
    unpack(swaps)
    assert not any(isinstance(module, PackedLinear | PackedEmbedding) for module in net.modules())
    assert net.head.weight is net.embed.weight and net.twice[0] is net.twice[1]
    restored = net.state_dict()
    assert restored.keys() == weights.keys()
    assert all(torch.equal(restored[name], weight) for name, weight in weights.items())


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["scaled", "normed", "hooked"])
def test_head_tied_to_a_special_embedding_is_not_packed(kind):
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) * 8

    net = Net()
    net.embed = Scaled(37, 13) if kind == "scaled" else nn.Embedding(37, 13, max_norm=1.0 if kind == "normed" else None)
    if kind == "hooked":
        net.embed.register_forward_hook(lambda *_: None)
    net.head.weight = net.embed.weight
    pack(net, KERNELS)
    assert type(net.head) is nn.Linear
    assert net.head.weight is net.embed.weight
