"""The native decoder for the architectures of families/, whose differences are fields of a DecoderSpec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import torch
from torch import Tensor

from ..kernels.library import Choice
from ..kernels.matmul import Packing, Sources
from ..types import ModelError
from .checkpoint import multimodal
from .checkpoint.weights import Checkpoint, reported
from .decoder_layer import Layer
from .decoder_spec import sinks_name
from .executor import CapturedHead, Eager, Executor
from .forward import Forward, Outputs
from .fused import Fused
from .gpu import choice as gpu_choice
from .gpu.coded import CodedRows
from .importance import ROWS, of_hidden
from .layer_inputs import LayerInputs
from .layers import InFile, Linear, Quantization, softcap
from .norms import make_norm
from .precision import head_bits, is_grouped, layer_bits, weighs_columns
from .rope import Rotary
from .spec import ModelSpec


class Decoder:
    """A loaded model that our own code computes."""

    def __init__(self, spec: ModelSpec, device: torch.device, product: Choice, *, tied: bool) -> None:
        if spec.decoder is None:
            raise ModelError(f"{spec.architecture} is not one of the native decoder's architectures")
        decoder, dtype = spec.decoder, spec.dtype
        self.spec, self.product = spec, product
        self.embedding = Linear(spec.vocab_size, decoder.hidden_size, False, dtype, device)
        self.layers: list[Layer] = []
        caches, shared = decoder.caches, {shape.shares for shape in decoder.shapes}
        for index in range(len(decoder.shapes)):
            self.layers.append(Layer(index, spec, decoder, device, cache=caches[index], is_shared=index in shared))
            if spec.on_gpu:  # the plain weights may not fit: they are allocated, and quantized, layer by layer
                for _, linear, *_ in self.layers[-1].parts():
                    linear.defer()
        self.norm = make_norm(decoder.hidden_size, decoder.norm_eps, dtype, device, decoder.norm)
        self.head = self.embedding if tied else Linear(spec.vocab_size, decoder.hidden_size, False, dtype, device)
        if spec.on_gpu:
            self.head.defer()
        self.embedding.row_scale, self.head.scale = decoder.scales.embedding, decoder.scales.logits
        self._cap = decoder.scales.cap
        angles = torch.float32 if decoder.wide_angles else dtype
        self.rotaries = [Rotary(rope, spec.serve_len, angles, device) for rope in decoder.ropes]
        self.inputs = None if decoder.inputs is None else LayerInputs(spec, decoder, decoder.inputs, device)
        # In order of preference; the last one can compute every step.
        self.executors: list[Executor] = [Eager(self.embedding, self.layers, self.rotaries, self.inputs)]
        self.captured_head: CapturedHead | None = None  # set by a runner with graphs
        sinks = ((sinks_name(layer.index), layer.sinks) for layer in self.layers)
        self.sinks: Mapping[str, Tensor] = {name: found for name, found in sinks if found is not None}
        self.num_params = self.weights_bytes = self.saved_bytes = 0
        self.weights_hash = ""

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        checkpoint: Checkpoint,
        device: torch.device,
        product: Choice,
        progress: Callable[[float], None],
        *,
        has_read: Callable[[], None] = lambda: None,
    ) -> Decoder:
        """Load a model from a checkpoint that has passed `check`, see models.load. Raises ModelError if a file cannot
        be read.

        At most one weight, or those of one layer, are in memory twice.
        """
        assert spec.decoder is not None
        tied, (prefix, head) = spec.decoder.tied, multimodal.place(checkpoint.entries)
        if tied and head in checkpoint.entries:
            # A head with its own weights is used, whatever config.json says.
            tied = checkpoint.equal(head, f"{prefix}embed_tokens.weight")
        model = cls(spec, device, product, tied=tied)
        targets = {prefix + name: target for name, target in model.targets().items()}
        if not tied:
            targets[head] = model.head.weight
        model.num_params = sum(target.numel() for target in targets.values())
        # If the spec does not count a separate head, the embedding is stored besides, as a plain table.
        model.weights_bytes = spec.weights_bytes + (model.num_params - spec.num_params) * spec.dtype.itemsize
        model.weights_hash = checkpoint.weights_hash
        total = checkpoint.num_bytes_of(targets) or 1
        targets.clear()
        with closing(checkpoint):
            model._fill(checkpoint, (prefix, head), total, progress)
        has_read()
        model._finish()
        return model

    def _fill(
        self, checkpoint: Checkpoint, place: tuple[str, str], total: int, progress: Callable[[float], None]
    ) -> None:
        """Read the weights, `total` bytes, and pack them. `place`: see `multimodal.place`.

        Weights that our kernels can pack as stored are read by the kernels, all in one call. The others are copied to
        their targets and packed layer by layer.
        """
        (prefix, head), done = place, 0

        def report(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            if converted or not in_file:  # else only norms are being read: the packing reports the progress
                progress(done / total)

        kernels = self.product.kernels
        packing = None if kernels is None else Packing(kernels)
        in_file: dict[Linear, InFile] = {}
        converted = False  # whether weights are converted before they are packed, layer by layer

        def claim(linears: Mapping[Linear, list[str]]) -> set[str]:
            """Find the weights of linear layers that can be packed from the files; return their names. Allocate the
            others."""
            claimed: set[str] = set()
            for linear, names in linears.items():
                parts: Sources | Sequence[CodedRows] = []
                if packing is not None:
                    parts = checkpoint.stored(names, linear.weight.dtype)
                elif self.spec.on_gpu:
                    parts = checkpoint.coded(names)
                if parts:
                    in_file[linear] = InFile(parts, packing, self.spec.activation_bytes)
                    claimed.update(names)
                else:
                    linear.allocate()
            return claimed

        def read(targets: Mapping[str, Tensor], claimed: set[str]) -> None:
            checkpoint.fill({name: target for name, target in targets.items() if name not in claimed}, report)

        embedding = f"{prefix}embed_tokens.weight"
        hidden = None
        if weighs_columns(self.spec.quantization):
            hidden = of_hidden(checkpoint.rows(embedding, ROWS).to(self.norm.weight.device))
        for layer in self.layers:
            weights: dict[Linear, list[str]] = {}
            for name, linear, *_ in layer.parts():
                weights.setdefault(linear, []).append(f"{prefix}{name}.weight")
            claimed = claim(weights)
            read({prefix + name: target for name, target in layer.targets().items()}, claimed)
            with checkpoint.reading():
                self._pack_layer(layer, hidden, in_file)
            if count := sum(in_file[linear].converted for linear in weights if linear in in_file):
                converted = True
                report(count)
        tables = {self.head: [embedding if self.head is self.embedding else head]}
        if self.spec.quantization == "gguf":  # an embedding stays in its blocks, also beside a head of its own
            tables[self.embedding] = [embedding]
        if self.inputs is not None:
            tables |= {linear: [f"{prefix}{name}"] for name, linear in self.inputs.in_files.items()}
        claimed = claim(tables)
        ends = {prefix + name: target for name, target in self._ends().items()}
        if self.head is not self.embedding:
            ends[head] = self.head.weight
        read(ends, claimed)
        ends.clear()
        self._pack_ends(in_file)
        if packing is not None and in_file:
            with reported(packing, lambda num_bytes: progress((done + num_bytes) / total)), checkpoint.reading():
                packing.run()
        progress(1.0)

    def _ends(self) -> dict[str, Tensor]:
        """Return the targets of the weights before and after the layers."""
        ends = {"embed_tokens.weight": self.embedding.weight, "norm.weight": self.norm.weight}
        return ends if self.inputs is None else ends | self.inputs.targets()

    def targets(self) -> dict[str, Tensor]:
        """Return checkpoint name -> the tensor to read it into."""
        targets = self._ends()
        for layer in self.layers:
            targets |= layer.targets()
        return targets

    def pack(self) -> None:
        """Pack weights that have all been read."""
        hidden = of_hidden(self.embedding.weight[:ROWS]) if weighs_columns(self.spec.quantization) else None
        for layer in self.layers:
            self._pack_layer(layer, hidden, {})
        self._pack_ends({})
        self._finish()

    def _pack_layer(self, layer: Layer, hidden: Tensor | None, in_file: Mapping[Linear, InFile]) -> None:
        bits = layer_bits(self.spec.quantization, layer.index, len(self.layers), self.spec.num_params)
        layer.pack(self.product.kernels, bits, hidden, in_file)

    def _pack_ends(self, in_file: Mapping[Linear, InFile]) -> None:
        # Logits must be float32. A tied head and embedding are stored once, in a form that both can use.
        bits, looked_up = head_bits(self.spec.quantization), self.head is self.embedding
        grouped = is_grouped(self.spec.quantization, self.spec.num_params)
        quantization = None if bits is None else Quantization(bits, grouped=grouped)
        kernels, of_head = self.product.kernels, in_file.get(self.head)
        self.head.pack(kernels, wide=True, looked_up=looked_up, quantization=quantization, in_file=of_head)
        if self.embedding is not self.head and (in_blocks := in_file.get(self.embedding)) is not None:
            self.embedding.pack(kernels, in_file=in_blocks)
        self.norm.pack(kernels)
        if self.inputs is not None:
            self.inputs.pack(kernels, in_file)

    def _finish(self) -> None:
        """Choose the executors, after everything is packed."""
        inputs = [] if self.inputs is None else self.inputs.in_files.values()
        linears = {self.head, *inputs, *(linear for layer in self.layers for _, linear, *_ in layer.parts())}
        self.saved_bytes = sum(linear.saved_bytes for linear in linears)
        parts = self.spec, self.embedding, self.layers, self.rotaries, self.inputs
        fused = Fused.of(self.product.kernels, *parts[:4])
        if fused is not None:
            self.executors.insert(0, fused)
        on_gpu, self.product = gpu_choice.choose(
            parts, norm=self.norm, head=self.head, linears=linears, product=self.product, project=self.project
        )
        if on_gpu is not None:
            self.executors.insert(0, on_gpu)

    @torch.inference_mode()
    def forward(self, forward: Forward) -> Outputs:
        """Run a step, see Model.forward."""
        x = next(executor for executor in self.executors if executor.takes(forward)).run(forward)
        hidden = None if forward.hidden_at is None else self.norm(x[forward.hidden_at])
        logits_at = forward.logits_at
        if self.captured_head is not None and self.captured_head.has_logits(x, logits_at):
            return Outputs(self.captured_head.logits(len(logits_at)), hidden)
        return Outputs(self.project(x if len(logits_at) == len(x) else x[logits_at]), hidden)

    def project(self, x: Tensor) -> Tensor:
        """Return the logits, see Outputs, of hidden states before the final norm: [n, hidden_size]."""
        logits = self.head(self.norm(x))
        if self._cap is not None:
            logits = softcap(logits, self._cap, self.product.kernels)
        return logits if logits.dtype == torch.float64 else logits.float()
