"""Logits of every architecture against transformers' forward, over schedules that a scheduler could produce."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, ModelError, attention, models
from engine.attention import AttentionMeta, KVCache, create
from engine.batch import Row
from engine.kernels.library import choose
from engine.models.families.architectures import MODEL_TYPES
from engine.models.layers import ACTIVATIONS, Gated, Linear, can_reorder
from engine.models.spec import read_spec
from engine.runner.state_inputs import StateInputs
from tests.engine.test_attention import spoil
from tests.models import (
    FALLBACK,
    FLOAT32_ONLY,
    MAX_LEN,
    MODELS,
    NATIVE,
    VOCAB,
    corrections,
    load_model,
    make,
    oracle,
    prompt,
)

CPU = torch.device("cpu")
BLOCK, SEQS = 4, 16


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name in FLOAT32_ONLY else torch.float64


def limit_of(name: str) -> float:
    """Return the tolerance: some models' softmax, gemma's scale of embeddings, norms of helium and gemma4, and most
    models' states are in float32, even if the rest is in float64."""
    wide = "gemma2", "vaultgemma", "granite_swa", "gemma-uneven", "helium"
    float32 = dict.fromkeys(wide, 1e-5) | dict.fromkeys(
        ("gemma4", "qwen3_5", "qwen3_next", "granitemoehybrid-mamba", "nemotron_h"), 5e-5
    )
    default = 2e-5 if name in FLOAT32_ONLY else 1e-9
    return next((limit for start, limit in float32.items() if name.startswith(start)), default)


def load(folder: Path, dtype: torch.dtype, max_len: int | None = None, kv_dtype: str = "auto") -> models.Model:
    name = str(dtype).removeprefix("torch.")
    config = EngineConfig(model=str(folder), dtype=name, max_len=max_len, kv_dtype=kv_dtype)
    return load_model(config, folder)


class Bench:
    """A model with a cache, run row by row."""

    def __init__(self, model: models.Model, num_blocks: int = 128, seed: int = 0) -> None:
        self.model, spec = model, model.spec
        self.cache = KVCache.allocate(
            create(attention.choose("auto", CPU, spec.layers, spec.dtype, cache_dtype=spec.cache_dtype).name),
            spec.layers,
            num_blocks=num_blocks,
            block_size=BLOCK,
            dtype=spec.cache_dtype,
            device=CPU,
            sinks=model.sinks,
        )
        for layer in self.cache.layers:
            spoil(layer.tensor)
        self.states = StateInputs.of(spec, EngineConfig(model="", max_seqs=SEQS), CPU)
        for states in self.states.layers if self.states is not None else ():
            for tensor in states:
                spoil(tensor)
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.blocks: dict[int, list[int]] = {}
        self.done: dict[int, int] = {}

    def step(self, rows: dict[int, list[int]], *, last_only: bool = False) -> dict[int, Tensor]:
        """Compute these tokens of each sequence; returns each row's logits, [tokens, vocab] or of the last token."""
        table, starts, at = [], [], 0
        for seq, ids in rows.items():
            start = self.done.get(seq, 0)
            blocks = self.blocks.setdefault(seq, [])
            while len(blocks) * BLOCK < start + len(ids):
                blocks.append(self.free.pop())
            table.append((blocks, start, len(ids)))
            self.done[seq] = start + len(ids)
        positions = [start + i for _, start, new in table for i in range(new)]
        for _, _, new in table:
            starts.append(range(at + new - 1 if last_only else at, at + new))
            at += new
        states = None
        if self.states is not None:
            each = zip(rows.items(), table, strict=True)
            told = [Row(seq, start, ids, [], 0) for (seq, ids), (_, start, _) in each]
            states = self.states.prepare(told, [list(self.blocks).index(seq) for seq in rows])
        step = models.Forward(
            torch.tensor([token for ids in rows.values() for token in ids]),
            torch.tensor(positions),
            self.cache.plan(AttentionMeta.of(table, BLOCK)),
            self.cache,
            torch.tensor([place for span in starts for place in span]),
            states,
        )
        logits = self.model.forward(step).logits
        return dict(zip(rows, logits.split([len(span) for span in starts]), strict=True))


def whole(reference, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([ids]), use_cache=False).logits[0]


def serve_len(name: str) -> int:
    # Where transformers takes other frequencies for long sequences, the lengths at which both take the short ones.
    return 64 if "longrope" in name else MAX_LEN


@pytest.mark.parametrize("name", [*NATIVE, *FALLBACK])
def test_logits_equal_transformers(home, name):
    dtype = dtype_of(name)
    folder = make(name, home / name, dtype=dtype)
    model, reference = load(folder, dtype, serve_len(name)), oracle(folder, dtype)
    assert model.spec.implementation == ("native" if name in NATIVE else "transformers")
    assert model.spec.vocab_size == VOCAB
    weights = [*reference.parameters(), *corrections(reference)]
    assert model.num_params == model.spec.num_params == sum(weight.numel() for weight in weights)
    prompts = [prompt(length, seed=length) for length in (5, 33, 18, 1)]
    want = [whole(reference, ids) for ids in prompts]

    def difference(got: list[list[Tensor]]) -> float:
        found = [torch.cat(parts) for parts in got]
        assert all(x.dtype == dtype and x.shape == y.shape for x, y in zip(found, want, strict=True))
        return max((x - y).abs().max().item() for x, y in zip(found, want, strict=True))

    alone = [[Bench(model).step({0: ids})[0]] for ids in prompts]
    assert difference(alone) < limit_of(name)

    bench, chunked = Bench(model), []
    for seq, ids in enumerate(prompts):
        chunked.append([bench.step({seq: ids[at : at + 7]})[seq] for at in range(0, len(ids), 7)])
    assert difference(chunked) < limit_of(name)

    # Chunks and single tokens of all sequences mixed into one line of tokens
    bench, dice = Bench(model, seed=3), random.Random(3)
    mixed: list[list[Tensor]] = [[] for _ in prompts]
    while open_ := [s for s, ids in enumerate(prompts) if bench.done.get(s, 0) < len(ids)]:
        chosen = sorted(open_, key=lambda _: dice.random())[: dice.randint(1, len(open_))]
        starts = {s: bench.done.get(s, 0) for s in chosen}
        rows = {s: prompts[s][at : at + dice.choice([1, 1, 2, 9])] for s, at in starts.items()}
        for seq, logits in bench.step(rows).items():
            mixed[seq].append(logits)
    assert difference(mixed) < limit_of(name)


@pytest.mark.parametrize(
    "name, kv_dtype, error",
    [("qwen3", "int8", 0.03), ("gpt2", "int8", 0.03), ("gemma2", "int8", 0.03), ("gpt_oss", "int8", 0.03),
     ("qwen3", "fp8", 0.1), ("gemma2", "fp8", 0.1)],
)  # fmt: skip
def test_a_cache_with_scales_serves_every_kind_of_model(home, name, kv_dtype, error):
    """With windows, softcaps and sinks, for whole prompts and concurrent chunks."""
    dtype = dtype_of(name)
    folder = make(name, home / f"{name}-int8", dtype=dtype)
    plain, model = (load(folder, dtype, MAX_LEN, kv) for kv in ("auto", kv_dtype))
    assert model.spec.cache_dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[kv_dtype]
    assert model.spec.kv_bytes_per_token < plain.spec.kv_bytes_per_token
    prompts = [prompt(length, seed=length) for length in (33, 18, 1)]
    want = [Bench(plain).step({0: ids})[0] for ids in prompts]
    alone = [Bench(model).step({0: ids})[0] for ids in prompts]
    bench, parts = Bench(model), [[] for _ in prompts]
    for at in range(0, 33, 5):
        rows = {s: ids[at : at + 5] for s, ids in enumerate(prompts) if at < len(ids)}
        for s, logits in bench.step(rows).items():
            parts[s].append(logits)
    for exact, whole_, mixed in zip(want, alone, parts, strict=True):
        scale = exact.norm()
        assert (whole_ - exact).norm() / scale < error
        # A key may be rounded to the next number where sums were rounded otherwise.
        assert (torch.cat(mixed) - whole_).norm() / scale < (0.01 if dtype == torch.float32 else 1e-3)


def test_what_a_layer_computes_is_known_before_the_weights_are_read(home):
    """The scale, windows, caps and sinks of transformers' models, as they hand them to attention."""
    specs = {}
    for name in ("gemma2", "gpt_oss"):
        folder = make(name, home / name, dtype=dtype_of(name))
        config = EngineConfig(model=str(folder), implementation="transformers")
        specs[name] = models.describe(folder, config)
    theirs = specs["gemma2"].source
    for layer in specs["gemma2"].layers:
        assert layer.scale == theirs["query_pre_attn_scalar"] ** -0.5
        assert layer.softcap == theirs["attn_logit_softcapping"] and layer.sinks is None
    assert load(home / "gemma2", torch.float32).spec.layers == specs["gemma2"].layers
    names = [layer.sinks for layer in specs["gpt_oss"].layers]
    assert names == [f"model.layers.{index}.self_attn.sinks" for index in range(len(names))]
    assert {layer.window for layer in specs["gpt_oss"].layers} == {8, None}
    config = EngineConfig(model=str(home / "gpt_oss"), dtype="float32", implementation="transformers")
    loaded = load_model(config, home / "gpt_oss")
    assert {name: sinks.shape for name, sinks in loaded.sinks.items()} == dict.fromkeys(
        names, (loaded.spec.layers[0].num_heads,)
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_only_requested_logits_are_computed(home, name):
    model = load(make(name, home / name, dtype=torch.float64), torch.float64)
    every, last = Bench(model).step({0: prompt(9)})[0], Bench(model).step({0: prompt(9)}, last_only=True)[0]
    assert last.shape == (1, VOCAB) and torch.allclose(every[-1:], last, atol=1e-12)
    meta, nowhere = AttentionMeta.of([([0], 0, 2)], BLOCK), torch.tensor([], dtype=int)
    cache = Bench(model).cache
    step = models.Forward(torch.tensor([5, 6]), torch.arange(2), cache.plan(meta), cache, nowhere)
    none = model.forward(step)
    assert none.logits.shape == (0, VOCAB) and none.hidden is None


@pytest.mark.parametrize("name", ["stories260k", "babyllama-char-940k"])
def test_greedy_text_of_real_models(data, name):
    folder = data / "models" / name
    cases = json.loads((folder / "reference_greedy.json").read_text())["cases"]
    cases = [case for case in cases if case["max_new_tokens"] <= 128]
    assert len(cases) >= 5
    model, ends = load(folder, torch.float32), (1, 2)
    bench, ids = Bench(model, num_blocks=2048), {i: list(case["prompt_token_ids"]) for i, case in enumerate(cases)}
    feed = dict(ids)
    while feed:
        logits, feed = bench.step(feed, last_only=True), {}
        for seq, row in logits.items():
            token, case = int(row.argmax()), cases[seq]
            ids[seq].append(token)
            new = len(ids[seq]) - len(case["prompt_token_ids"])
            if token not in ends and new < len(case["output_token_ids"]):
                feed[seq] = [token]
    for seq, case in enumerate(cases):
        assert ids[seq][len(case["prompt_token_ids"]) :] == case["output_token_ids"]


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
def test_frequencies_do_not_depend_on_other_requests(home, name):
    model = load(make(name, home / name, dtype=torch.float64), torch.float64)
    short = prompt(20)
    alone = Bench(model).step({0: short})[0]
    bench = Bench(model)
    beside = bench.step({1: prompt(100, seed=1), 0: short})[0]
    assert torch.allclose(alone, beside, atol=1e-12)
    assert torch.allclose(alone, Bench(model).step({0: short})[0], atol=0)


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
def test_long_sequences_have_the_long_frequencies(home, name):
    # At full length transformers, which looks at the longest position, takes the frequencies that serve_len gives.
    folder = make(name, home / name, dtype=torch.float64)
    length = 1024 if "dynamic" in name else MAX_LEN
    model = load(folder, torch.float64)
    assert model.spec.serve_len == length
    want = whole(oracle(folder, torch.float64), prompt(length))
    # Growing ones it computes in float32 on the way, where we do not.
    limit = 1e-2 if "dynamic" in name else 1e-9
    assert (Bench(model, num_blocks=300).step({0: prompt(length)})[0] - want).abs().max() < limit


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 1}),
        ("jamba", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}),
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 2}),
        ("falcon", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
        ("bert", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}),
        ("t5", {"d_model": 32, "num_layers": 1}),
    ],
)
def test_models_that_cannot_run_on_the_cache_are_refused(tmp_path, kind, settings):
    from transformers import AutoConfig

    AutoConfig.for_model(kind, vocab_size=VOCAB, **settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        models.describe(tmp_path, EngineConfig(model=""))
    text = str(error.value)
    assert "\n" not in text and len(text) < 300
    assert "cannot be served through transformers' attention interface" in text or "causal language model" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scaling": torch.tensor(0.5)}, "the scale of its attention is no constant"),
        ({"sinks": torch.nn.Parameter(torch.zeros(2)) * 2}, "the sinks of its attention are no parameter"),
        ({"other": torch.zeros(1)}, "its attention depends on other"),
    ],
    ids=["scale", "sinks", "unknown"],
)
def test_what_is_no_constant_of_a_layer_rules_a_model_out(home, monkeypatch, changes, reason):
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention

    forward = GptOssAttention.forward

    def changed(self, *args, **kwargs):
        if "scaling" in changes:
            self.scaling = changes["scaling"]
        if "sinks" in changes:
            self._parameters.pop("sinks", None)
            self.sinks = changes["sinks"]
        return forward(self, *args, **kwargs, **{name: changes[name] for name in changes if name == "other"})

    folder = make("gpt_oss", home / "gpt_oss", dtype=torch.float32)
    monkeypatch.setattr(GptOssAttention, "forward", changed)
    with pytest.raises(ModelError, match=reason):
        models.describe(folder, EngineConfig(model=str(folder), implementation="transformers"))


def test_state_outside_of_attention_is_noticed(home, monkeypatch):
    """A model with correct attention that also reads the previous token of the flattened batch."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    folder = make("gpt2", home / "gpt2", dtype=torch.float64)
    forward = GPT2MLP.forward
    monkeypatch.setattr(GPT2MLP, "forward", lambda self, x: forward(self, x + x.roll(1, dims=1)))
    with pytest.raises(ModelError, match="something other than attention passes from one token to another"):
        load(folder, torch.float64)


def test_the_native_model_and_the_fallback_agree(home):
    for name in (
        "qwen3",
        "mistral",
        "llama-llama3",
        "olmo3-yarn",
        "granite-bias",
        "gemma2-uncapped",
        "gemma3_text",
        "cohere2",
    ):
        folder = make(name, home / name, dtype=torch.float64)
        native = load(folder, torch.float64)
        config = EngineConfig(model="", dtype="float64", implementation="transformers")
        other = load_model(config, folder)
        assert (native.spec.implementation, other.spec.implementation) == ("native", "transformers")
        assert native.spec.layers == other.spec.layers
        assert native.spec.num_params == other.spec.num_params and native.weights_hash == other.weights_hash
        ids = prompt(30)
        assert (Bench(native).step({0: ids})[0] - Bench(other).step({0: ids})[0]).abs().max() < limit_of(name)


def test_a_model_is_of_the_type_that_its_config_names(tmp_path):
    # transformers saves EXAONE 3 with the name of Llama's class; its older checkpoints have that of their own code.
    spec = partial(read_spec, config=EngineConfig(model=""))
    assert spec({**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "exaone"}) is None
    for unknown in ("aquila", "qwen3_vl_text"):  # of which transformers has no causal language model
        assert spec({**BASE, "architectures": ["LlamaForCausalLM"], "model_type": unknown}) is not None
    other = {"architectures": ["WhaleForCausalLM"]}, {"model_type": "llama"}
    for changed, implementation in zip(other, ("transformers", "native"), strict=True):
        folder = make("mistral", tmp_path / implementation, dtype=torch.float64)
        source = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(source | changed))
        model, ids = load_model(EngineConfig(model="", dtype="float64"), folder), prompt(30)
        assert model.spec.implementation == implementation
        assert (Bench(model).step({0: ids})[0] - whole(oracle(folder, torch.float64), ids)).abs().max() < 1e-9
    (folder / "config.json").write_text(json.dumps(source | {"architectures": ["MistralForSequenceClassification"]}))
    with pytest.raises(ModelError, match="MistralForSequenceClassification is not a causal language model"):
        load_model(EngineConfig(model=""), folder)


@pytest.mark.parametrize("kind", [kind for kind in MODEL_TYPES if kind != "nemotron_h"])  # which has none
def test_rotary_embeddings_without_parameters_are_those_of_transformers(kind):
    from transformers import AutoConfig

    attending = {"layer_types": ["full_attention"], "num_local_experts": 0, "position_embedding_type": "rope"}
    sizes = {
        "granitemoehybrid": {"num_hidden_layers": 1, **attending},
        "glm4_moe": {"head_dim": 128},
        "deepseek_v2": {"num_experts_per_tok": 6},
        "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    }
    theirs = AutoConfig.for_model(kind, **sizes.get(kind, {}))
    source = theirs.to_dict() | {"rope_parameters": None, "architectures": [MODEL_TYPES[kind]]}
    spec = read_spec(source, EngineConfig(model=""))
    assert spec is not None and spec.decoder is not None
    given = theirs.rope_parameters
    thetas = {each["rope_theta"] for each in ([given] if "rope_theta" in given else given.values())}
    assert {rope.theta for rope in spec.decoder.ropes} == thetas
    assert spec.decoder.ropes[0].scaling == (given.get("full_attention") or given)["rope_type"]


def test_native_implementation_can_be_required(home):
    folder = make("gpt2", home / "gpt2", dtype=torch.float64)
    with pytest.raises(ModelError, match="the native implementation has no GPT2LMHeadModel"):
        models.describe(folder, EngineConfig(model="", implementation="native"))


BASE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 99}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, (4, 16, None, 2048)),
        ({"model_type": "llama", "num_key_value_heads": None}, (4, 16, None, 2048)),
        ({"model_type": "mistral", "num_attention_heads": 8}, (8, 8, 4096, 131072)),
        ({"model_type": "mistral", "num_attention_heads": 8, "sliding_window": None}, (8, 8, None, 131072)),
        ({"model_type": "qwen3", "num_key_value_heads": 2}, (2, 128, None, 32768)),
        ({"model_type": "qwen2", "num_key_value_heads": 2, "sliding_window": 9}, (2, 16, None, 32768)),
        ({"model_type": "smollm3", "sliding_window": 9}, (4, 16, None, 32768)),
        ({"model_type": "olmo2"}, (4, 16, None, 2048)),
        ({"model_type": "granite"}, (4, 16, None, 2048)),
        ({"model_type": "olmo3"}, (4, 16, None, 2048)),
        (
            {"model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 0},
            (2, 16, 4096, 32768),
        ),
        (
            {
                "model_type": "qwen3",
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
            },
            (2, 128, 7, 32768),
        ),
    ],
)
def test_defaults_of_missing_config_keys_equal_transformers(source, expected):
    spec = read_spec({**BASE, **source}, EngineConfig(model=""))
    assert spec is not None
    layer = spec.layers[-1]
    assert (layer.num_kv_heads, layer.head_dim, layer.window, spec.max_len) == expected
    assert spec.kv_bytes_per_token == len(spec.layers) * 4 * layer.numbers


@pytest.mark.parametrize("name", NATIVE)
def test_spec_agrees_with_transformers_about_the_windows(name):
    from tests.models import config

    theirs = config(name)
    spec = read_spec({**theirs.to_dict(), "architectures": [arch(name)]}, EngineConfig(model=""))
    assert spec is not None
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    kinds = [kind for kind in kinds if kind not in ("linear_attention", "conv", "mlp", "moe")]
    window = getattr(theirs, "sliding_window", None)
    expected = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.window for layer in spec.attended] == expected


def arch(name: str) -> str:
    return MODEL_TYPES[MODELS[name][0]]


@pytest.mark.parametrize("isa", ["auto", "torch"])
@pytest.mark.parametrize("looked_up", [False, True])
def test_packed_products_in_bfloat16(isa, looked_up):
    linear = Linear(48, 64, True, torch.bfloat16, CPU)
    weight, bias = torch.randn(48, 64).bfloat16(), torch.randn(48).bfloat16()
    linear.weight.copy_(weight)
    assert linear.bias is not None
    linear.bias.copy_(bias)
    kernels = choose(isa, CPU, torch.bfloat16).kernels
    packs = kernels is not None or (can_reorder(linear.weight) and not looked_up)
    linear.pack(kernels, looked_up=looked_up)
    assert linear.weight.numel() == (0 if packs else weight.numel())
    for rows in (1, 2, 16, 300):
        x, residual = torch.randn(rows, 64).bfloat16(), torch.randn(rows, 48).bfloat16()
        want = x.double() @ weight.double().t() + bias.double()
        assert (linear(x).double() - want).abs().max() < 0.01 * want.abs().max()
        assert (linear(x, residual).double() - want - residual.double()).abs().max() < 0.02 * want.abs().max()
    if looked_up:
        assert torch.equal(linear.rows(torch.tensor([47, 0, 0])), weight[[47, 0, 0]])


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_without_a_name_in_config_json_the_dtype_is_that_of_the_checkpoint(home, name):
    folder = make(name, home / f"{name}-bfloat16", dtype=torch.bfloat16)
    path = folder / "config.json"
    source = json.loads(path.read_text())
    path.write_text(json.dumps(source | {"dtype": "float16"}))
    assert models.examine(folder, EngineConfig(model=str(folder)))[0].dtype == torch.float16
    parts = [part for part in (source, source.get("text_config", {})) if part.pop("dtype", None)]
    path.write_text(json.dumps(source))
    assert parts and models.examine(folder, EngineConfig(model=str(folder)))[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-bias"])
def test_packed_weights_are_held_once(home, name):
    """Only the packed form is kept, even of an embedding that is tied to the head."""
    folder = make(name, home / name, dtype=torch.float64)
    model = load_model(EngineConfig(model=str(folder), dtype="bfloat16"), folder)
    if not model.product.invariant:
        pytest.skip("no CPU kernels here")
    linears = [linear for layer in model.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    linears += [model.head] if name == "qwen3-tied" else [model.head, model.embedding]
    assert (model.head is model.embedding) == (name == "qwen3-tied")
    assert all(
        linear.weight.numel() == 0 for linear in linears if linear is not model.embedding or name == "qwen3-tied"
    )
    held = sum(
        linear.weight.numel() * 2 if linear._packed is None else linear._packed.panels.numel() * 4 for linear in linears
    )
    padding = 32 * 2 * 128 * len(linears)  # at most a panel of each, half-filled
    assert model.weights_bytes * 0.9 < held < model.weights_bytes + padding


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "relu"])
def test_gates_of_every_activation(activation):
    for kernels in (None, choose("auto", CPU, torch.float32).kernels):
        gated = Gated(9, 20, True, torch.float32, CPU, activation=activation)
        weight, bias = torch.randn(18, 20), torch.randn(18)
        gated.weight.copy_(weight)
        assert gated.bias is not None
        gated.bias.copy_(bias)
        gated.pack(kernels)
        x, residual = torch.randn(5, 20), torch.randn(5, 9)
        gate, up = (x @ weight.t() + bias).chunk(2, dim=-1)
        want = ACTIVATIONS[activation](gate) * up
        assert torch.allclose(gated(x), want, atol=1e-4) and torch.allclose(
            gated(x, residual), want + residual, atol=1e-4
        )


@pytest.mark.parametrize("isa", ["auto", "torch"])
@pytest.mark.parametrize(
    "name",
    [
        "llama-bias",
        "qwen2",
        "qwen3-tied",
        "mistral",
        "smollm3",
        "olmo3-yarn",
        "granite-bias",
        "gemma2-uncapped",
        "gemma3_text-scaled",
        "phi3-partial",
        "cohere2-bias",
        "glm4",
    ],
)
def test_float32_is_near_transformers(home, name, isa):
    """In float32 the kernels compute, in float64 torch does."""
    folder = make(name, home / name, dtype=torch.float64)
    config = EngineConfig(model=str(folder), dtype="float32", cpu_isa=isa)
    model, reference = load_model(config, folder), oracle(folder, torch.float64)
    assert isa == "torch" or model.product.invariant == (choose("auto", CPU, torch.float32).kernels is not None)
    for length in (1, 40):
        want = whole(reference, prompt(length))
        got = Bench(model).step({0: prompt(length)})[0]
        assert (got - want).abs().max() < 1e-4 * want.abs().max()


def test_bfloat16_is_near_float32(home):
    folder = make("qwen3-tied", home / "qwen3-tied", dtype=torch.float64)
    exact, rough = (Bench(load(folder, dtype)).step({0: prompt(40)})[0] for dtype in (torch.float32, torch.bfloat16))
    assert rough.dtype == torch.float32
    assert (rough - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (
            "bart",
            {
                "d_model": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "decoder_attention_heads": 4,
                "decoder_ffn_dim": 128,
            },
        ),
        ("roberta", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}),
    ],
)
def test_a_model_that_counts_positions_in_its_own_way_is_refused(kind, settings, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **settings, vocab_size=300, max_position_embeddings=130, is_decoder=True)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.2)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="positions"):
        load(tmp_path, torch.float32)
