"""Messages that cross the engine's boundary, and the errors that it raises.

Every message is a frozen msgspec Struct encoded as an array: it can be sent to another process and
never changes. Text has no place here: the engine takes token ids and gives token ids.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Pooling(Struct, frozen=True, array_like=True, kw_only=True):
    """How a sequence's last hidden states (behind the final norm) become one vector of length 1."""

    kind: str = "last"  # last: the last token's; mean: the mean over all tokens, which takes nothing from the cache
    dimensions: int | None = None  # of the vector, its first ones; None, or more than there are: all of them


class SamplingParams(Struct, frozen=True, array_like=True, kw_only=True):
    """How one sequence draws its tokens. Filters apply in the order of the fields' groups.

    Order: penalties, bias, allowed_ids, bad_words, min_tokens mask, grammar, temperature, top_k, top_p, min_p,
    draw. `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` is always set: the draw is a
    function of (seed, number of tokens since the end of the prompt). With `pooling` nothing is drawn and no other
    field counts: the prompt may be as long as the model takes, and what comes is one delta with its embedding and
    "stop".
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
    min_tokens: int = 0  # stop_ids cannot be drawn before this many
    stop_ids: tuple[int, ...] = ()  # the model's end tokens (unless ignored) and the user's
    logprobs: int | None = None  # None: none; 0: the drawn token's; k: also the k most likely
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, but the first, which nothing predicts
    allowed_ids: tuple[int, ...] | None = None  # only these can be drawn
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last token of such a run cannot follow the others in the output
    grammar: tuple[str, str] | None = None  # (kind, text), see engine/grammar; what ends with "stop" follows it
    pooling: Pooling | None = None  # the prompt becomes a vector

    @property
    def narrowest(self) -> str:
        """The field to blame when all of them together leave no token that could be drawn."""
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
    """One sequence to continue. `output_ids` is not empty when a request is handed over part-way."""

    id: int  # unique among all requests that an engine ever gets
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    output_ids: tuple[int, ...] = ()
    priority: int = 0  # lower is served first, under the policy `priority`
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    flow: str = ""  # whose request it is: what waits is served fairly among flows, by the tokens that each has had
    weight: float = 1.0  # of the flow: one of weight 2 gets twice the tokens of one of weight 1
    compile_s: float = 0.0  # CPU time that compiling the grammar takes, as far as is known


class ErrorCode(StrEnum):
    """Why a request failed, where someone must act on the reason. The sentence beside it is for people alone."""

    NO_TOKEN_LEFT = "no_token_left"  # the request's filters and its grammar exclude every token
    GRAMMARS_BUSY = "grammars_busy"  # its grammar waited too long to be compiled


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Log-probability of a drawn token in the raw distribution, and the most likely alternatives."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int | None = None  # of a prompt's token among all tokens at its position, 1 for the most likely


class RequestStats(Struct, frozen=True, array_like=True, kw_only=True):
    """What a finished request cost. Times are seconds of the engine's monotonic clock; 0.0: never happened."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens whose keys and values were found in the prefix cache
    output_tokens: int
    arrived: float
    scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0  # or the embedding, which has no first token
    preemptions: int = 0


class TokenDelta(Struct, frozen=True, array_like=True, kw_only=True):
    """New tokens of one request; the one with a finish_reason is the last."""

    id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # as long as token_ids, when asked for
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # all at once with the first token, when asked for
    finish_reason: str | None = None  # stop | length | abort | error
    error: str | None = None  # a sentence, with finish_reason error
    code: ErrorCode | None = None  # with error: its kind, where that decides what the client is sent
    field: str | None = None  # with error: the field of SamplingParams that is to blame, where there is one
    stats: RequestStats | None = None  # with the first token and with the finish_reason
    embedding: bytes | None = None  # float32, little-endian; alone, when asked for


class Roofline(Struct, frozen=True, array_like=True, kw_only=True):
    """What bounds a step of a model on a machine: rates that were measured, and what the model's shape asks for.

    A step reads all weights once, and the keys and values that each row sees; windows are not looked at.
    """

    bytes_per_s: float  # read from the device's memory
    flops_per_s: float  # of products with the weights
    pair_flops_per_s: float  # of attention's, which are never of weights that were rounded to integers
    weights_bytes: int  # that every step reads: all but a table of which it looks rows up
    kv_bytes_per_token: int
    flops_per_token: int  # of each computed token, in the layers' products
    flops_per_pair: int  # of a computed token and one that it sees, in all layers' attention
    flops_per_logit: int  # of each position whose logits are computed

    def bytes(self, context: int) -> int:
        """Bytes that a step must read whose rows see `context` tokens, summed over them."""
        return self.weights_bytes + context * self.kv_bytes_per_token

    def flops(self, tokens: int, pairs: int, logits: int) -> int:
        """Operations of a step; a multiplication and its addition are two."""
        return tokens * self.flops_per_token + pairs * self.flops_per_pair + logits * self.flops_per_logit

    def multiply_seconds(self, tokens: int, pairs: int, logits: int) -> float:
        """The least time for a step's operations."""
        return self.flops(tokens, 0, logits) / self.flops_per_s + pairs * self.flops_per_pair / self.pair_flops_per_s

    def seconds(self, tokens: int, context: int, pairs: int, logits: int) -> float:
        """The least time of a step: reading and computing go on beside each other, and the slower one decides."""
        return max(self.bytes(context) / self.bytes_per_s, self.multiply_seconds(tokens, pairs, logits))


class EngineInfo(Struct, frozen=True, array_like=True, kw_only=True):
    """What a loaded engine is; sent once, when it is ready."""

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
    exact: bool  # the same bits in any batch
    num_params: int
    weights_bytes: int
    kv_bytes_per_token: int
    weights_hash: str
    load_seconds: float
    torch: str
    revision: str | None = None  # the commit that all files came from, of a model from a hub
    product: str = "torch"  # what computes the matrix products: an instruction set of our own kernels, or torch
    product_note: str = ""  # what is lost by it
    product_fix: str = ""  # how to get it
    sampling: str = "torch"  # what samples from the logits: an instruction set of our own kernels, or torch
    hidden_size: int = 0  # numbers of an embedding; 0: this model tells no hidden states
    quantization: str = "none"  # what the weights were rounded to
    notes: tuple[str, ...] = ()  # what was changed from what was asked, one sentence each
    roofline: Roofline | None = None  # None: what the model's steps ask for is not known, as with experts


class StepStats(Struct, frozen=True, array_like=True, kw_only=True):
    """One step of the loop, as the metrics and the step log tell it. Without rows: only the books changed."""

    step: int
    time: float  # seconds since the epoch
    rows: tuple[tuple[int, int], ...]  # (request id, tokens computed), in arrival order
    budget: int  # tokens that the step could have computed
    prompt_tokens: int  # of prompts, or computed again
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
    output_tokens: int = 0  # added to outputs, those included that grammars forced
    forced_tokens: int = 0  # that grammars left no choice about, and that were not drawn
    context: int = 0  # cached tokens that the rows see, summed over the rows
    pairs: int = 0  # pairs of a computed token and one that it sees
    logits: int = 0  # positions whose logits were computed
    # schedule, prepare, forward, masks, sample, publish (of the step before); and kernels, which is a part of these
    seconds: dict[str, float] = {}

    @property
    def blocks_unaccounted(self) -> int:
        return self.blocks_total - self.blocks_free - self.blocks_cached - self.blocks_held


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose; its text is one sentence for a person."""


class ModelError(EngineError):
    """The model cannot be loaded: a broken folder, an unknown architecture, too little memory."""


class ConfigError(EngineError):
    """A setting is impossible."""


class MemoryShort(ConfigError):
    """The settings need more memory than can be had now."""


class RequestError(EngineError):
    """This request can never run."""


class EngineDied(EngineError):
    """The engine stopped and could not be restarted."""
