"""Messages that cross the engine's boundary, and the errors that it raises.

Every message is a frozen msgspec Struct encoded as an array, so it can be sent to another process. There is no text in
them: the engine takes and returns token ids.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from .cache_groups import CacheGroups


class Pooling(Struct, frozen=True, array_like=True, kw_only=True):
    """How a prompt becomes one vector: its last hidden states (after the final norm), scaled to length 1, or logits."""

    # last: the last token's hidden state; mean: the mean over all tokens, which cannot use the prefix cache; logits:
    # the logits of the token after the prompt, of `token_ids` alone and as they are
    kind: str = "last"
    dimensions: int | None = None  # of hidden states, keep only this many leading ones; None: all
    token_ids: tuple[int, ...] = ()  # of logits


class SamplingParams(Struct, frozen=True, array_like=True, kw_only=True):
    """How to sample a sequence's tokens.

    Filters apply in this order: penalties, bias, allowed_ids, bad_words, min_tokens mask, grammar, temperature, top_k,
    top_p, min_p. `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is always set: sampling
    is a function of (seed, number of tokens since the end of the prompt). With `pooling` nothing is sampled and other
    fields are ignored: the prompt may have the model's full length, and the only delta has the vector and "stop".
    """

    max_tokens: int
    seed: int = 0  # 64 bits, unsigned
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0  # stop_ids cannot be sampled before this many tokens
    stop_ids: tuple[int, ...] = ()  # the model's end tokens (unless ignored) and the user's
    logprobs: int | None = None  # None: none; 0: the sampled token's; k: also the k most likely
    prompt_logprobs: int | None = None  # the same for the prompt's tokens except the first, which has no prediction
    allowed_ids: tuple[int, ...] | None = None  # only these can be sampled
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of a sequence cannot follow the others in the output
    grammar: tuple[str, str] | None = None  # (kind, text), see engine/grammar; an output that "stop" ends matches
    pooling: Pooling | None = None  # return a vector of the prompt instead

    @property
    def narrowest(self) -> str:
        """The field to blame if the fields together leave no token that can be sampled."""
        if self.allowed_ids is not None:
            return "allowed_ids"
        if self.logit_bias:
            return "logit_bias"
        return "bad_words" if self.bad_words else "grammar" if self.grammar is not None else "min_tokens"

    @property
    def uses_history(self) -> bool:
        """Whether the sampler must know the tokens before the current one."""
        return bool(self.bad_words or self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty)


class EngineRequest(Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence to continue. `output_ids` is not empty if the request is resumed."""

    id: int  # unique among all requests of an engine
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...] = ()
    priority: int = 0  # lower is served first, under the policy `priority`
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    flow: str = ""  # that the request is charged to: waiting requests are served fairly among flows, see service.py
    weight: float = 1.0  # of the flow: one of weight 2 gets twice the tokens of one of weight 1
    compile_s: float = 0.0  # CPU time that compiling the grammar takes; 0: not known


class ErrorCode(StrEnum):
    """Why a request failed, for errors that the server handles by their kind."""

    NO_TOKEN_LEFT = "no_token_left"  # the request's filters and its grammar exclude every token
    GRAMMARS_BUSY = "grammars_busy"  # its grammar waited too long to be compiled


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The log-probability of a sampled token in the raw distribution, and the most likely alternatives."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int | None = None  # of a prompt's token among all tokens at its position, 1 for the most likely


class RequestStats(Struct, frozen=True, array_like=True, kw_only=True):
    """The figures of a request. Times are seconds of the engine's monotonic clock; 0.0: has not happened."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens that were found in the prefix cache
    output_tokens: int
    arrived: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0  # or time of the embedding
    preemptions: int = 0


class TokenDelta(Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """New tokens of one request; the one with a finish_reason is the last."""

    id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # as long as token_ids, if requested
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # all of them with the first token, if requested
    finish_reason: str | None = None  # stop | length | abort | error
    error: str | None = None  # a sentence, with finish_reason error
    code: ErrorCode | None = None  # with error: its kind, if the response depends on it
    field: str | None = None  # with error: the field of SamplingParams that caused it, if any
    stats: RequestStats | None = None  # with the first token, the first one after a preemption, and the finish_reason
    embedding: bytes | None = None  # the vector of `pooling`, float32, little-endian


class Roofline(Struct, frozen=True, array_like=True, kw_only=True):
    """The limits of a model's steps on a machine: measured rates, and the work that the model's shape implies.

    A step reads all weights once, and the keys and values that each row attends to; windows are ignored.
    """

    bytes_per_s: float  # read from the device's memory
    flops_per_s: float  # of matmuls with the weights
    pair_flops_per_s: float  # of attention, whose operands are never quantized weights
    weights_bytes: int  # that every step reads: all but a separate embedding table
    kv_bytes_per_token: int
    flops_per_token: int  # of each computed token, in the layers' matmuls
    flops_per_pair: int  # of a computed token and one that it attends to, in all layers
    flops_per_logit: int  # of each position whose logits are computed

    def bytes(self, context: int) -> int:
        """Return the bytes that a step must read whose rows attend to `context` tokens in total."""
        return self.weights_bytes + context * self.kv_bytes_per_token

    def flops(self, tokens: int, pairs: int, logits: int) -> int:
        """Return the number of operations of a step; a multiply-add counts as two."""
        return tokens * self.flops_per_token + pairs * self.flops_per_pair + logits * self.flops_per_logit

    def multiply_seconds(self, tokens: int, pairs: int, logits: int) -> float:
        """Return the minimum time for a step's operations."""
        return self.flops(tokens, 0, logits) / self.flops_per_s + pairs * self.flops_per_pair / self.pair_flops_per_s

    def rows(self, factor: float) -> int:
        """Return the number of rows with which a decode step takes `factor` times as long as with one, if the keys and
        values that the rows attend to take no time."""
        return int(factor * self.seconds(1, 0, 0, 1) / self.multiply_seconds(1, 0, 1))

    def seconds(self, tokens: int, context: int, pairs: int, logits: int) -> float:
        """Return the minimum time of a step: reading and computing overlap, and the slower one determines it."""
        return max(self.bytes(context) / self.bytes_per_s, self.multiply_seconds(tokens, pairs, logits))


class EngineInfo(Struct, frozen=True, array_like=True, kw_only=True):
    """The properties of a loaded engine; sent once, when it is ready."""

    model: str
    architecture: str
    max_len: int  # tokens of prompt plus output
    vocab_size: int  # width of the logits; token ids are in [0, vocab_size)
    block_size: int  # tokens per block
    num_blocks: int
    max_seqs: int
    max_batched_tokens: int
    dtype: str
    device: str
    attention: str  # name of the backend
    kv_dtype: str  # of the keys and values in the cache
    implementation: str  # native | transformers
    exact: bool  # results have the same bits in any batch
    num_params: int
    weights_bytes: int  # in memory
    kv_bytes_per_token: int  # in all layers
    weights_hash: str
    load_seconds: float
    torch: str
    revision: str | None = None  # the commit of a model from a hub
    product: str = "torch"  # what computes matmuls: an instruction set of the CPU kernels, or torch
    product_note: str = ""  # the disadvantage of this choice
    product_fix: str = ""  # how to avoid it
    sampling: str = "torch"  # what samples from the logits: an instruction set of the CPU kernels, triton, or torch
    graphs: int = 0  # sizes of steps in CUDA graphs when the engine is ready; it captures others while it is idle
    hidden_size: int = 0  # dimensions of an embedding; 0: the model's hidden states are not available
    quantization: str = "none"  # of the weights
    weight_packing: str = "none"  # lossless: weights are compressed
    notes: tuple[str, ...] = ()  # differences from the settings, one sentence each
    roofline: Roofline | None = None  # None: the work of the model's steps is not known, as with experts
    groups: CacheGroups = CacheGroups()

    @property
    def num_tokens(self) -> int:
        """The number of tokens of requests of full length that the KV cache holds."""
        return self.groups.num_tokens(self.num_blocks, self.block_size, self.max_batched_tokens, self.max_len)

    @property
    def beats_during_steps(self) -> bool:
        """Whether heartbeats go on while a step is computed, see StepThread."""
        return self.device == "cpu"

    @property
    def kv_cache_bytes(self) -> int:
        return self.num_blocks * self.groups.block_bytes(self.block_size, self.kv_bytes_per_token)


class StepStats(Struct, frozen=True, array_like=True, kw_only=True):
    """The figures of one step of the loop, for metrics and the step log. Without rows nothing was computed."""

    step: int
    time: float  # seconds since the epoch
    rows: tuple[tuple[int, int], ...]  # (request id, tokens computed), in arrival order
    budget: int  # tokens that the step could have computed
    prompt_tokens: int  # of prompts, including recomputed tokens
    decode_tokens: int
    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_total: int
    preempted: int  # sequences preempted in this step
    prefix_queries: int  # tokens looked up in the prefix cache since the last step
    prefix_hits: int
    output_tokens: int = 0  # added to outputs, including forced ones
    forced_tokens: int = 0  # that a grammar determined, and that were not sampled
    context: int = 0  # cached tokens that the rows attend to, summed over the rows
    pairs: int = 0  # pairs of a computed token and one that it attends to
    logits: int = 0  # positions whose logits were computed
    # By phase: schedule, prepare, forward, masks, sample, publish (of the previous step); and kernels, a part of these.
    seconds: dict[str, float] = {}

    @property
    def blocks_unaccounted(self) -> int:
        return self.blocks_total - self.blocks_free - self.blocks_cached - self.blocks_held


class EngineError(Exception):
    """Base of all errors that the engine raises deliberately; the text is one sentence for the user."""


class ModelError(EngineError):
    """The model cannot be loaded: a broken folder, an unknown architecture, too little memory."""


class ConfigError(EngineError):
    """A setting is invalid, or not possible on this machine."""


class MemoryShort(ConfigError):
    """The settings need more memory than can be had now."""


class RequestError(EngineError):
    """The request can never run."""


class EngineDied(EngineError):
    """The engine stopped and could not be restarted."""
