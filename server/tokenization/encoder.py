"""Encodes prompts on two threads, one for ordinary texts and one for large ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from engine import ConfigError, ModelError, read_text

from ..http.errors import unavailable
from .detokenizer import text_offsets
from .renderer import MAX_CHARACTERS, SWITCHES, Message, Renderer, TemplateError
from .tokenizer import Tokenizer
from .worker_thread import WorkerThread

T = TypeVar("T")

# Characters that are tokenized in some hundredths of a second. Up to this size a text does not wait for large ones, and
# is tokenized before it is refused: unknown characters can be one token, and normalizing can drop characters.
ORDINARY = 65_536
CHARACTERS_PER_TOKEN = 4  # roughly, in most languages
# Of a text that need not fit the context, or as many as fit it if that is more. A request may have as many ids in
# arrays; millions would hold the thread for a minute.
MAX_TOKENS = 320_000


class RenderOptions(TypedDict, total=False):
    """Further arguments of ChatTemplates.render, with its defaults."""

    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any] | None


class TextTooLong(Exception):
    """A text does not fit the context; the message is for the client."""


class Cancelled(Exception):
    """The caller has stopped waiting for this work."""


class Prompts:
    """Runs the tokenizer and the chat templates off the event loop.

    `max_len` is the context in tokens, None until the engine reports it. `chat_template` replaces the model's own
    templates. Callers, named by `caller`, take turns.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_len: int | None = None, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_len = max_len
        templates = tokenizer.templates if chat_template is None else {"default": chat_template}
        # Only two threads, so that a burst of long prompts does not take the cores from the engine. Each has a process
        # for the chat templates; the second process is started for the first large text.
        self._ordinary, self._large = WorkerThread("tokenizer"), WorkerThread("large texts")
        self._templates, self._large_templates = (Renderer(templates, tokenizer.special_tokens) for _ in range(2))

    @classmethod
    def load(cls, tokenizer: Tokenizer, chat_template: Path | None) -> Prompts:
        """Create Prompts with the template of a file, if given. Raises ConfigError if that cannot be compiled."""
        if chat_template is None:
            return cls(tokenizer)
        try:
            text = read_text(chat_template)
            if text is None:
                raise ConfigError(f"--chat-template {chat_template}: there is no such file")
            prompts = cls(tokenizer, chat_template=text)
            prompts.check_template()
        except (ModelError, TemplateError) as error:
            raise ConfigError(f"--chat-template {chat_template} cannot be used: {error}") from None
        return prompts

    @property
    def has_template(self) -> bool:
        return bool(self._templates)

    @property
    def template_source(self) -> str:
        """The text of the chat templates; empty if there are none."""
        return self._templates.source

    @property
    def takes_effort(self) -> bool:
        """Whether the chat template has a variable for the reasoning effort."""
        return any(name in self._templates.source for name in ("reasoning_effort", *SWITCHES))

    def max_tokens(self, fits: bool) -> int | None:
        """Return the limit of a text's tokens, None until the engine reports the context. `fits`: see encode."""
        return self.max_len if fits or self.max_len is None else max(MAX_TOKENS, self.max_len)

    def max_characters(self, fits: bool = True) -> int:
        """Return the length of the longest text that could have so few tokens."""
        limit = self.max_tokens(fits)
        return MAX_CHARACTERS if limit is None else min(MAX_CHARACTERS, max(ORDINARY, limit * self.tokenizer.longest))

    async def encode(self, text: str, add_special: bool = True, *, caller: str = "", fits: bool = True) -> list[int]:
        """Encode a plain prompt. Raises TextTooLong.

        `fits`: a long text must fit the context. Otherwise it may have up to MAX_TOKENS tokens if that is more.
        """
        self._check(text, fits)
        stop = threading.Event()
        return await self._run(lambda: self._encode(text, add_special, stop, fits), len(text), caller, stop)

    async def encode_with_offsets(
        self, text: str, add_special: bool = True, *, caller: str = ""
    ) -> tuple[list[int], list[int]]:
        """Encode a plain prompt; returns the ids and their offsets in it, in characters. Raises TextTooLong."""
        self._check(text)
        stop = threading.Event()

        def work() -> tuple[list[int], list[int]]:
            if len(text) > ORDINARY:
                self._encode(text, add_special, stop)  # in pieces, so that it can raise early
            ids, added = self.tokenizer.encode_marked(text, add_special)
            own = text_offsets(self.tokenizer, [i for i, is_added in zip(ids, added, strict=True) if not is_added])
            # A normalizer may have made the tokens' text longer than the prompt's.
            own = [min(offset, len(text)) for offset in own]
            own.append(len(text) if own else 0)
            index, offsets = 0, []
            for is_added in added:
                offsets.append(own[index])
                index += not is_added
            return ids, offsets

        return await self._run(work, len(text), caller, stop)

    async def decode_with_offsets(
        self, ids: Sequence[int], skip_special: bool = True, *, caller: str = ""
    ) -> tuple[str, list[int]]:
        """Decode token ids; returns the text and the offset of each token in it, in characters."""
        return await self._run(
            lambda: (self.tokenizer.decode(ids, skip_special), text_offsets(self.tokenizer, ids, skip_special)),
            CHARACTERS_PER_TOKEN * len(ids),
            caller,
        )

    async def encode_words(self, words: Sequence[str], *, caller: str = "") -> list[tuple[int, ...]]:
        """Encode each word at the start of a text and after a space; returns the distinct encodings."""

        def work() -> list[tuple[int, ...]]:
            found: list[tuple[int, ...]] = []
            for word in words:
                bare, spaced = (tuple(self.tokenizer.encode(f"{s}{word.lstrip()}", False)) for s in ("", " "))
                # One that ends in the first encoding is redundant.
                found += [each for each in (bare, spaced) if each and (each is bare or each[-len(bare) :] != bare)]
            return list(dict.fromkeys(found))

        return await self._run(work, sum(map(len, words)), caller)

    async def chat(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        caller: str = "",
        fits: bool = True,
        **options: Unpack[RenderOptions],
    ) -> list[int]:
        """Render and encode a conversation; raises TemplateError and TextTooLong. `fits`: see encode."""
        stop = threading.Event()
        size = characters([messages, tools, options])

        def work() -> list[int]:
            text = self._renderer(size).render(messages, tools, **options)
            self._check(text, fits)
            # The template writes bos and eos itself. Special tokens that users have written are encoded as such, too.
            return self._encode(text, False, stop, fits)

        return await self._run(work, size, caller, stop)

    async def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        caller: str = "",
        **options: Unpack[RenderOptions],
    ) -> str:
        """Render the prompt of a conversation; raises TemplateError."""
        size = characters([messages, tools, options])
        return await self._run(lambda: self._renderer(size).render(messages, tools, **options), size, caller)

    async def decode(self, ids: Sequence[int], skip_special: bool = True, *, caller: str = "") -> str:
        size = CHARACTERS_PER_TOKEN * len(ids)
        return await self._run(lambda: self.tokenizer.decode(ids, skip_special), size, caller)

    async def tokens(self, ids: Sequence[int], *, caller: str = "") -> list[str]:
        """Return each token as the vocabulary has it."""
        return await self._run(lambda: self.tokenizer.tokens(ids), CHARACTERS_PER_TOKEN * len(ids), caller)

    def check_template(self) -> None:
        """Compile the chat template, if there is one; raises TemplateError."""
        if self._templates:
            self._templates.check()

    def start(self) -> None:
        """Start the process for chat templates and prepare to split texts, so that no request need wait for them."""
        self._ordinary.begin(self._templates.start)
        # Reading a large vocabulary holds the GIL for a tenth of a second or more, so not during the first large text.
        self._large.begin(lambda: self.tokenizer.splitter)

    def close(self) -> None:
        """Stop the threads and processes; work that has not started is cancelled."""
        for part in (self._ordinary, self._large, self._templates, self._large_templates):
            part.close()

    def _renderer(self, size: int) -> Renderer:
        """The renderer of the thread for texts of this size."""
        return self._templates if size <= ORDINARY else self._large_templates

    def _check(self, text: str, fits: bool = True) -> None:
        if len(text) > (limit := self.max_characters(fits)):
            size = f"the prompt has {len(text)} characters, and at most {limit} can fit"
            raise TextTooLong(f"{self._rule(fits)}; {size}.")

    def _rule(self, fits: bool) -> str:
        if fits:
            return f"This model's maximum context length is {self.max_len} tokens (--max-model-len)"
        return f"A text that is only tokenized, counted or cut can have at most {self.max_tokens(fits)} tokens"

    def _encode(self, text: str, add_special: bool, stop: threading.Event, fits: bool = True) -> list[int]:
        """Encode a text, on a worker thread. Raises TextTooLong for a large one with too many tokens; see `encode`."""
        if len(text) <= ORDINARY:
            return self.tokenizer.encode(text, add_special)
        limit = self.max_tokens(fits)

        def check(num_tokens: int) -> None:
            if stop.is_set():
                raise Cancelled
            if limit is not None and num_tokens > limit:
                raise TextTooLong(f"{self._rule(fits)}, and the prompt has more than {limit}.")

        return self.tokenizer.encode_long(text, add_special, check)

    async def _run(self, work: Callable[[], T], size: int, caller: str, stop: threading.Event | None = None) -> T:
        """Run work on about `size` characters; `stop` is set if the caller stops waiting. Raises 503."""
        try:
            return await (self._ordinary if size <= ORDINARY else self._large).run(caller, work)
        except OSError:  # the chat template's process cannot be started
            raise unavailable("Chat templates cannot be rendered at the moment.", "templates_unavailable") from None
        finally:
            if stop is not None:
                stop.set()


def characters(value: Any) -> int:
    """The approximate number of characters in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + characters(item) for key, item in value.items())
    return sum(map(characters, value)) if isinstance(value, list) else 1
