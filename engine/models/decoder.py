"""Our own decoder: Llama, Mistral, Qwen2 and Qwen3 (dense) in one file, their differences in a DecoderSpec."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import torch
from torch import Tensor

from ..kernels.library import Choice
from ..kernels.matmul import Packing
from ..types import ModelError
from .decoder_layer import Layer
from .executor import Eager, Executor
from .forward import Forward, Outputs
from .fused import Fused
from .layers import InFile, Linear, RMSNorm
from .rope import Rotary
from .spec import BITS, ModelSpec
from .weights import Checkpoint

WATCH_S = 0.1  # between two looks at how far the packing is


class Decoder:
    """A loaded model of our own."""

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
        # In order of preference; the last one takes every step.
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
        """A model with the weights of a checkpoint that has passed `check`. Raises ModelError where it cannot be read.

        No more is held at once than all weights, and one of them, or those of a layer, a second time.
        """
        prefix, tied = _layout(spec, checkpoint)
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
        """Choose the executors, once everything is packed."""
        fused = Fused.of(self.product.kernels, self.spec, self.embedding, self.layers, self.rotary)
        if fused is not None:
            self.executors.insert(0, fused)

    @torch.inference_mode()
    def forward(self, forward: Forward) -> Outputs:
        """Model.forward."""
        x = next(executor for executor in self.executors if executor.takes(forward)).run(forward)
        hidden = None if forward.hidden_at is None else self.norm(x[forward.hidden_at])
        logits_at = forward.logits_at
        x = self.norm(x if len(logits_at) == len(x) else x[logits_at])
        logits = self.head(x)
        return Outputs(logits if logits.dtype == torch.float64 else logits.float(), hidden)


def _layout(spec: ModelSpec, checkpoint: Checkpoint) -> tuple[str, bool]:
    """The prefix of the tensors' names, and whether config.json says that the head is the embedding."""
    prefix = "model." if "model.embed_tokens.weight" in checkpoint.entries else ""
    return prefix, spec.decoder is not None and spec.decoder.tied


def check(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise ModelError unless a checkpoint holds all tensors of a model in their shapes, and no others.

    Nothing is allocated: config.json may ask for any amount of memory.
    """
    prefix, tied = _layout(spec, checkpoint)
    entries = checkpoint.entries
    model = Decoder(spec, torch.device("meta"), Choice(None, ""), tied=tied)
    places = {prefix + name: place for name, place in model.places().items()}
    if not tied or "lm_head.weight" in entries:
        places["lm_head.weight"] = model.head.weight
    checkpoint.check(places)
    for name in sorted(entries.keys() - places.keys()):
        # A tensor without a place means that the model is not what config.json says; these are harmless.
        if not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(f"the checkpoint holds the tensor {name}, for which {spec.architecture} has no place")


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
