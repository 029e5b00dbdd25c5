"""The native decoder for Llama, Mistral, Qwen2 and Qwen3 (dense), whose differences are fields of a DecoderSpec."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.library import Choice
from ..kernels.matmul import Packing
from ..types import ModelError
from . import on_gpu
from .decoder_layer import Layer
from .executor import Eager, Executor
from .forward import Forward, Outputs
from .fused import Fused
from .layers import InFile, Linear, Quantization, RMSNorm
from .on_gpu import OnGPU
from .precision import head_bits, layer_bits
from .rope import Rotary
from .spec import ModelSpec
from .weights import Checkpoint

WATCH_S = 0.1  # between two reports of the packing's progress


class Decoder:
    """A loaded model that our own code computes."""

    def __init__(self, spec: ModelSpec, device: torch.device, product: Choice, *, tied: bool) -> None:
        if spec.decoder is None:
            raise ModelError(f"{spec.architecture} is not one of the native decoder's architectures")
        decoder, dtype = spec.decoder, spec.dtype
        self.spec, self.product = spec, product
        self.embedding = Linear(spec.vocab_size, decoder.hidden_size, False, dtype, device)
        self.layers = [Layer(index, spec, decoder, device) for index in range(len(spec.layers))]
        self.norm = RMSNorm(decoder.hidden_size, decoder.norm_eps, dtype, device)
        self.head = self.embedding if tied else Linear(spec.vocab_size, decoder.hidden_size, False, dtype, device)
        self.rotary = Rotary(decoder.rope, spec.serve_len, dtype, device)
        # In order of preference; the last one can compute every step.
        self.executors: list[Executor] = [Eager(self.embedding, self.layers, self.rotary)]
        self.sinks: Mapping[str, Tensor] = {}
        self.num_params = self.weights_bytes = 0
        self.weights_hash = ""

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        device: torch.device,
        product: Choice,
        progress: Callable[[float], None],
    ) -> Decoder:
        """Load a model from a checkpoint that has passed `check`. Raises ModelError if a file cannot be read.

        At most one weight, or those of one layer, are in memory twice.
        """
        prefix, tied = _layout(spec, checkpoint)
        if tied and "lm_head.weight" in checkpoint.entries:
            # A head with its own weights is used, whatever config.json says.
            tied = checkpoint.equal("lm_head.weight", f"{prefix}embed_tokens.weight")
        model = cls(spec, device, product, tied=tied)
        targets = {prefix + name: target for name, target in model.targets().items()}
        if not tied:
            targets["lm_head.weight"] = model.head.weight
        model.num_params = sum(target.numel() for target in targets.values())
        # If the spec does not count a separate head, the embedding is stored besides, as a plain table.
        model.weights_bytes = spec.weights_bytes + (model.num_params - spec.num_params) * spec.dtype.itemsize
        model.weights_hash = checkpoint.weights_hash
        total = checkpoint.num_bytes_of(targets) or 1
        targets.clear()
        with closing(checkpoint):
            model._fill(checkpoint, prefix, total, progress)
        return model

    def _fill(self, checkpoint: Checkpoint, prefix: str, total: int, progress: Callable[[float], None]) -> None:
        """Read the weights, `total` bytes, and pack them.

        Weights that our kernels can pack as stored are read by the kernels, all in one call. The others are copied to
        their targets and packed layer by layer.
        """
        done = 0

        def report(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if converted or not in_file:  # else only norms are being read: the packing reports the progress
                progress(done / total)

        kernels = self.product.kernels
        packing = None if kernels is None else Packing(kernels)
        in_file: dict[Linear, InFile] = {}
        converted = False  # whether weights are converted before they are packed, layer by layer

        def read(targets: dict[str, Tensor], linears: Mapping[Linear, list[str]]) -> None:
            """Fill the targets, except weights of linear layers that can be packed from the files."""
            for linear, names in linears.items():
                parts = [] if packing is None else checkpoint.stored(names, self.spec.dtype)
                if packing is not None and parts:
                    in_file[linear] = InFile(parts, packing, self.spec.activation_bytes)
                    for name in names:
                        del targets[name]
            checkpoint.fill(targets, report)

        for layer in self.layers:
            weights: dict[Linear, list[str]] = {}
            for name, linear, *_ in layer.parts():
                weights.setdefault(linear, []).append(f"{prefix}{name}.weight")
            read({prefix + name: target for name, target in layer.targets().items()}, weights)
            self._pack_layer(layer, in_file)
            if count := sum(in_file[linear].converted for linear in weights if linear in in_file):
                converted = True
                report(count)
        ends = {prefix + name: target for name, target in self._ends().items()}
        head = f"{prefix}embed_tokens.weight"
        if self.head is not self.embedding:
            head, ends["lm_head.weight"] = "lm_head.weight", self.head.weight
        tables = {self.head: [head]}
        if self.spec.quantization == "gguf":  # an embedding stays in its blocks, also beside a head of its own
            tables[self.embedding] = [f"{prefix}embed_tokens.weight"]
        read(ends, tables)
        ends.clear()
        self._pack_head(in_file.get(self.head))
        if self.embedding is not self.head and (in_blocks := in_file.get(self.embedding)) is not None:
            self.embedding.pack(kernels, in_file=in_blocks)
        if packing is not None and in_file:
            with _watched(packing, lambda num_bytes: progress((done + num_bytes) / total)):
                try:
                    packing.run()
                except OSError as error:
                    raise checkpoint.unreadable(error) from None
        progress(1.0)
        self._finish()

    def _ends(self) -> dict[str, Tensor]:
        """Return the targets of the weights before and after the layers."""
        return {"embed_tokens.weight": self.embedding.weight, "norm.weight": self.norm.weight}

    def targets(self) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into."""
        targets = self._ends()
        for layer in self.layers:
            targets |= layer.targets()
        return targets

    def pack(self) -> None:
        """Pack weights that have all been read."""
        for layer in self.layers:
            self._pack_layer(layer)
        self._pack_head()
        self._finish()

    def _pack_layer(self, layer: Layer, in_file: Mapping[Linear, InFile] | None = None) -> None:
        layer.pack(self.product.kernels, layer_bits(self.spec.quantization, layer.index, len(self.layers)), in_file)

    def _pack_head(self, in_file: InFile | None = None) -> None:
        # Logits must be float32. A tied head and embedding are stored once, in a form that both can use.
        bits, looked_up = head_bits(self.spec.quantization), self.head is self.embedding
        quantization = None if bits is None else Quantization(bits)
        self.head.pack(self.product.kernels, wide=True, looked_up=looked_up, quantization=quantization, in_file=in_file)
        self.norm.pack(self.product.kernels)

    def _finish(self) -> None:
        """Choose the executors, after everything is packed."""
        parts = self.spec, self.embedding, self.layers, self.rotary
        fused = Fused.of(self.product.kernels, *parts)
        if fused is not None:
            self.executors.insert(0, fused)
        device = self.norm.weight.device
        objection = on_gpu.objection(self.spec, device, self.product.kernels) or on_gpu.trial(*parts)
        if objection is None:
            self.executors.insert(0, OnGPU(*parts))
            self.norm.use(lambda x: on_gpu.add_norm(x, None, self.norm))
        elif device.type == "cuda":
            self.product = replace(self.product, note=f"torch computes norms and gates of layers: {objection}")

    @torch.inference_mode()
    def forward(self, forward: Forward) -> Outputs:
        """Run a step, see Model.forward."""
        x = next(executor for executor in self.executors if executor.takes(forward)).run(forward)
        hidden = None if forward.hidden_at is None else self.norm(x[forward.hidden_at])
        logits_at = forward.logits_at
        x = self.norm(x if len(logits_at) == len(x) else x[logits_at])
        logits = self.head(x)
        return Outputs(logits if logits.dtype == torch.float64 else logits.float(), hidden)


def _layout(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[str, bool]:
    """Return the prefix of the tensors' names, and whether the head is the embedding according to config.json."""
    prefix = "model." if "model.embed_tokens.weight" in checkpoint.entries else ""
    return prefix, spec.decoder is not None and spec.decoder.tied


def check(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise ModelError unless a checkpoint has exactly the tensors of a model, in their shapes.

    Nothing is allocated, because the sizes in config.json may be arbitrarily large.
    """
    prefix, tied = _layout(spec, checkpoint)
    entries = checkpoint.entries
    model = Decoder(spec, torch.device("meta"), Choice(None, ""), tied=tied)
    targets = {prefix + name: target for name, target in model.targets().items()}
    if not tied or "lm_head.weight" in entries:
        targets["lm_head.weight"] = model.head.weight
    checkpoint.check(targets)
    for name in sorted(entries.keys() - targets.keys()):
        # An additional tensor means that config.json describes another model. These are harmless.
        if not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(f"the checkpoint holds the tensor {name}, which {spec.architecture} does not have")


@contextmanager
def _watched(packing: Packing, progress: Callable[[int], None]) -> Iterator[None]:
    """Report the number of packed bytes at intervals, from now until the end."""
    ended = threading.Event()

    def watch() -> None:
        progress(packing.num_bytes)
        while not ended.wait(WATCH_S):
            progress(packing.num_bytes)

    watcher = threading.Thread(target=watch, name="weights", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
