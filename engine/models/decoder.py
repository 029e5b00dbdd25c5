"""Our own decoder: Llama, Mistral, Qwen2 and Qwen3 (dense) in one file, their differences in a DecoderSpec."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..attention import AttentionMeta, KVCache
from ..kernels.library import Choice, Kernels
from ..kernels.matmul import Packing
from ..types import ModelError
from . import Outputs
from .layers import Gated, InFile, Linear, RMSNorm
from .rope import Rotary, rotate
from .spec import BITS, DecoderSpec, ModelSpec
from .stack import Stack
from .weights import Checkpoint

WATCH_S = 0.1  # between two looks at how far the packing is


class Layer:
    """One block: attention and a gated feed-forward part, each after a norm and added to what came in."""

    def __init__(self, index: int, model: ModelSpec, spec: DecoderSpec, device: torch.device) -> None:
        self.index, self.spec, self.window = index, spec, model.windows[index]
        dtype = model.dtype
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self.q_size, self.kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.attention_norm = RMSNorm(hidden, spec.norm_eps, dtype, device)
        self.qkv = Linear(self.q_size + 2 * self.kv_size, hidden, spec.qkv_bias, dtype, device)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype, device) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, dtype, device) if spec.qk_norm else None
        self.output = Linear(hidden, self.q_size, spec.output_bias, dtype, device)
        self.mlp_norm = RMSNorm(hidden, spec.norm_eps, dtype, device)
        self.gate_up = Gated(inner, hidden, spec.mlp_bias, dtype, device, activation=spec.activation)
        self.down = Linear(hidden, inner, spec.mlp_bias, dtype, device)

    def __call__(self, x: Tensor, turn: tuple[Tensor, Tensor], meta: AttentionMeta, cache: KVCache) -> Tensor:
        x = self.output(self.attend(self.attention_norm(x), turn, meta, cache), residual=x)
        return self.down(self.gate_up(self.mlp_norm(x)), residual=x)

    def attend(self, x: Tensor, turn: tuple[Tensor, Tensor], meta: AttentionMeta, cache: KVCache) -> Tensor:
        """What the heads see, side by side: [tokens, heads * head_dim]."""
        q, k, v = (
            part.unflatten(-1, (-1, self.spec.head_dim))
            for part in self.qkv(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *turn), rotate(k, *turn)
        out = cache.attend(self.index, q, k, v, meta, scale=self.spec.head_dim**-0.5, window=self.window)
        return out.flatten(1)

    def parts(self) -> list[tuple[str, Linear, int, int]]:
        """Checkpoint names of the linears, which rows of which they are; q, k and v share one matrix, gate and up
        another."""
        q, kv, inner = self.q_size, self.kv_size, self.spec.intermediate_size
        prefix = f"layers.{self.index}."
        return [
            (f"{prefix}self_attn.q_proj", self.qkv, 0, q),
            (f"{prefix}self_attn.k_proj", self.qkv, q, q + kv),
            (f"{prefix}self_attn.v_proj", self.qkv, q + kv, q + 2 * kv),
            (f"{prefix}self_attn.o_proj", self.output, 0, self.spec.hidden_size),
            (f"{prefix}mlp.gate_proj", self.gate_up, 0, inner),
            (f"{prefix}mlp.up_proj", self.gate_up, inner, 2 * inner),
            (f"{prefix}mlp.down_proj", self.down, 0, self.spec.hidden_size),
        ]

    def places(self) -> dict[str, Tensor]:
        """Checkpoint name -> where it goes."""
        prefix = f"layers.{self.index}."
        found = {
            "input_layernorm.weight": self.attention_norm.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
        }
        if self.q_norm is not None and self.k_norm is not None:
            found |= {"self_attn.q_norm.weight": self.q_norm.weight, "self_attn.k_norm.weight": self.k_norm.weight}
        found = {prefix + name: place for name, place in found.items()}
        for name, linear, begin, end in self.parts():
            found[f"{name}.weight"] = linear.weight[begin:end]
            if linear.bias is not None:
                found[f"{name}.bias"] = linear.bias[begin:end]
        return found

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def pack(self, kernels: Kernels | None, bits: int | None, in_file: Mapping[Linear, InFile] | None = None) -> None:
        """`in_file`: of those linears whose weights are not here."""
        for linear in self.linears:
            linear.pack(kernels, bits=bits, in_file=(in_file or {}).get(linear))
        for norm in (self.attention_norm, self.mlp_norm):
            norm.pack(kernels)


class Decoder:
    """A loaded model of our own."""

    def __init__(self, spec: ModelSpec, device: torch.device, product: Choice, *, tied: bool) -> None:
        if spec.decoder is None:
            raise ModelError(f"{spec.architecture} is not one of the native decoder's architectures")
        decoder, dtype = spec.decoder, spec.dtype
        self.spec, self.product = spec, product
        self.stack: Stack | None = None  # the layers in one call, where all of them have kernels
        self.embedding = Linear(spec.vocab_size, decoder.hidden_size, False, dtype, device)
        self.layers = [Layer(index, spec, decoder, device) for index in range(len(spec.layers))]
        self.norm = RMSNorm(decoder.hidden_size, decoder.norm_eps, dtype, device)
        self.head = self.embedding if tied else Linear(spec.vocab_size, decoder.hidden_size, False, dtype, device)
        self.rotary = Rotary(decoder.rope, spec.serve_len, dtype, device)
        self.num_params = self.weights_bytes = 0
        self.weights_hash = ""

    @classmethod
    def load(
        cls, spec: ModelSpec, folder: Path, device: torch.device, product: Choice, progress: Callable[[float], None]
    ) -> Decoder:
        """A model with the weights of a folder. Raises ModelError for a checkpoint that does not fit the spec.

        No more is held at once than all weights, and one of them, or those of a layer, a second time.
        """
        checkpoint = Checkpoint(folder)
        prefix, tied = check(spec, checkpoint)
        if tied and "lm_head.weight" in checkpoint.entries:
            # A head that was trained apart is used, whatever the flag says.
            tied = checkpoint.equal("lm_head.weight", f"{prefix}embed_tokens.weight")
        model = cls(spec, device, product, tied=tied)
        places = {prefix + name: place for name, place in model.places().items()}
        if not tied:
            places["lm_head.weight"] = model.head.weight
        model.num_params = sum(place.numel() for place in places.values())
        # A head that the spec does not know of leaves the embedding a plain table.
        model.weights_bytes = spec.weights_bytes + (model.num_params - spec.num_params) * spec.dtype.itemsize
        model.weights_hash = checkpoint.weights_hash
        total = checkpoint.num_bytes_of(places) or 1
        places.clear()
        with closing(checkpoint):
            model._fill(checkpoint, prefix, total, progress)
        return model

    def _fill(self, checkpoint: Checkpoint, prefix: str, total: int, progress: Callable[[float], None]) -> None:
        """Read the weights, `total` bytes, and pack them.

        What our kernels can pack as the files have it, they read themselves, all of it in one call. The rest is copied
        to its place, and packed layer by layer.
        """
        done = 0

        def tell(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if not in_file:  # else norms are read, and the work is still to come
                progress(done / total)

        kernels = self.product.kernels
        packing = None if kernels is None else Packing(kernels)
        in_file: dict[Linear, InFile] = {}

        def read(places: dict[str, Tensor], linears: Mapping[Linear, list[str]]) -> None:
            """Fill the places, but for weights of linears that can be packed from the files."""
            for linear, names in linears.items():
                parts = [] if packing is None else checkpoint.stored(names, self.spec.dtype)
                if packing is not None and parts:
                    in_file[linear] = InFile(parts, packing)
                    for name in names:
                        del places[name]
            checkpoint.fill(places, tell)

        for layer in self.layers:
            weights: dict[Linear, list[str]] = {}
            for name, linear, *_ in layer.parts():
                weights.setdefault(linear, []).append(f"{prefix}{name}.weight")
            read({prefix + name: place for name, place in layer.places().items()}, weights)
            self._pack_layer(layer, in_file)
        ends = {prefix + name: place for name, place in self._ends().items()}
        head = f"{prefix}embed_tokens.weight"
        if self.head is not self.embedding:
            head, ends["lm_head.weight"] = "lm_head.weight", self.head.weight
        read(ends, {self.head: [head]})
        ends.clear()
        self._pack_head(in_file.get(self.head))
        if packing is not None and in_file:
            with _watched(packing, lambda num_bytes: progress((done + num_bytes) / total)):
                try:
                    packing.run()
                except OSError as error:
                    file = checkpoint.file_of(error.filename)
                    raise ModelError(f"{file} cannot be read: {error.strerror}; download it again") from None
        progress(1.0)
        self._finish()

    def _ends(self) -> dict[str, Tensor]:
        """Places before and behind the layers."""
        return {"embed_tokens.weight": self.embedding.weight, "norm.weight": self.norm.weight}

    def places(self) -> dict[str, Tensor]:
        found = self._ends()
        for layer in self.layers:
            found |= layer.places()
        return found

    def pack(self) -> None:
        """Prepare weights that are all in their places."""
        for layer in self.layers:
            self._pack_layer(layer)
        self._pack_head()
        self._finish()

    def _pack_layer(self, layer: Layer, in_file: Mapping[Linear, InFile] | None = None) -> None:
        layer.pack(self.product.kernels, BITS[self.spec.quantization][0], in_file)

    def _pack_head(self, in_file: InFile | None = None) -> None:
        # Logits are wanted in float32. A head that is the embedding too is held once, in the form that both can use.
        bits, looked_up = BITS[self.spec.quantization][1], self.head is self.embedding
        self.head.pack(self.product.kernels, wide=True, looked_up=looked_up, bits=bits, in_file=in_file)
        self.norm.pack(self.product.kernels)

    def _finish(self) -> None:
        """With everything packed, all layers can be called as one."""
        assert self.spec.decoder is not None
        self.stack = Stack.of(self.product.kernels, self.spec.decoder, self.layers, self.rotary)

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        meta: AttentionMeta,
        cache: KVCache,
        logits_at: Tensor,
        *,
        hidden_at: Tensor | None = None,
    ) -> Outputs:
        """Model.forward."""
        x = self.embedding.rows(ids)
        if self.stack is not None and self.stack.takes(cache):
            x = self.stack(x, positions, meta, cache)
        else:
            turn = self.rotary.at(positions)
            for layer in self.layers:
                x = layer(x, turn, meta, cache)
        hidden = None if hidden_at is None else self.norm(x[hidden_at])
        x = self.norm(x if len(logits_at) == len(x) else x[logits_at])
        logits = self.head(x)
        return Outputs(logits if logits.dtype == torch.float64 else logits.float(), hidden)


def check(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[str, bool]:
    """Raise ModelError unless a checkpoint holds all tensors of a model in their shapes, and no others.

    Returns the prefix of their names, and whether config.json says that the head is the embedding. Nothing is
    allocated: config.json may ask for any amount of memory.
    """
    tied = spec.decoder is not None and spec.decoder.tied
    entries = checkpoint.entries
    prefix = "model." if "model.embed_tokens.weight" in entries else ""
    model = Decoder(spec, torch.device("meta"), Choice(None, ""), tied=tied)
    places = {prefix + name: place for name, place in model.places().items()}
    if not tied or "lm_head.weight" in entries:
        places["lm_head.weight"] = model.head.weight
    checkpoint.check(places)
    for name in sorted(entries.keys() - places.keys()):
        # A tensor without a place means that the model is not what config.json says; these are harmless.
        if not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(f"the checkpoint holds the tensor {name}, for which {spec.architecture} has no place")
    return prefix, tied


@contextmanager
def _watched(packing: Packing, progress: Callable[[int], None]) -> Iterator[None]:
    """Tell again and again how many bytes have been packed, now and until the end."""
    over = threading.Event()

    def watch() -> None:
        progress(packing.num_bytes)
        while not over.wait(WATCH_S):
            progress(packing.num_bytes)

    watcher = threading.Thread(target=watch, name="weights", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
