"""Limits that are checked when the prompts of a request are tokens.

Each choice has the prompt again, for the engine and in the response, and the bad words.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine import EngineInfo

from ..http.admission import MAX_OPEN_TOKENS
from ..http.errors import CONTEXT_CODE, invalid
from ..tokenization.renderer import MAX_CHARACTERS
from .output import Prompt
from .request import UNLIMITED, GenerationRequest

# Log-probabilities of prompts in one response: 10 MB of JSON, encoded in a quarter of a second (off the event loop).
MAX_SCORES = 1 << 17
MAX_BAD_TOKENS = 1 << 20  # about 40 MB in the engine


def max_completion(info: EngineInfo, request: GenerationRequest, ids: Sequence[int]) -> int:
    """Return the maximum number of tokens of this prompt's completions; raises 400 if the prompt leaves none."""
    left = info.max_len - len(ids)
    if left < 1:
        # Clients look for OpenAI's phrase.
        message = f"This model's maximum context length is {info.max_len} tokens of prompt and completion together"
        raise invalid(
            f"{message} (--max-model-len), and the prompt has {len(ids)}.", request.prompt_field, CONTEXT_CODE
        )
    limit = request.limit[1]
    most = left if limit is None or limit == UNLIMITED else min(limit, left)
    if request.min_tokens > most:
        raise invalid(f"Invalid 'min_tokens': the completion has at most {most} tokens.", "min_tokens")
    return most


def check_prompts(request: GenerationRequest, prompts: list[Prompt], vocab_size: int) -> None:
    """Raise 400 if the prompts of all choices, or what the response has of them, are too long."""
    tokens = sum(len(prompt.ids) for prompt in prompts) * request.num_choices
    if request.num_choices > 1 and tokens > MAX_OPEN_TOKENS:
        message = f"the prompts of all completions together have {tokens} tokens, and may have {MAX_OPEN_TOKENS}"
        raise invalid(f"Invalid 'n': {message}.", "n")
    # Token ids can have a hundred times as much text as the body.
    characters = sum(len(prompt.echo) for prompt in prompts) * request.num_choices
    if characters > MAX_CHARACTERS:
        message = f"the prompts in the response have {characters} characters, and may have {MAX_CHARACTERS}"
        raise invalid(f"Invalid 'echo': {message}.", "echo")
    count = request.num_scores(vocab_size)
    if request.scoring is not None and count is not None and tokens * (count + 1) > MAX_SCORES:
        message = f"{tokens} prompt tokens with {count + 1} log-probabilities each are more than {MAX_SCORES}"
        field = request.scoring[0]
        raise invalid(f"Invalid '{field}': {message} in one response.", field)


def check_bad_words(request: GenerationRequest, words: Sequence[tuple[int, ...]]) -> None:
    """Raise 400 if the bad words of all choices, given as tokens, are too many."""
    tokens = sum(map(len, words)) * request.num_prompts * request.num_choices
    if tokens > MAX_BAD_TOKENS:
        message = f"the bad words of all completions together have {tokens} tokens, and may have {MAX_BAD_TOKENS}"
        raise invalid(f"Invalid 'bad_words': {message}.", "bad_words")
