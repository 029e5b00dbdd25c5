"""Prompts to token ids, on the one thread that tokenizes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from engine import ConfigError, ModelError, read_text

from .rendering import MAX_CHARACTERS, Message, Renderer, TemplateError
from .text import text_offsets
from .tokenizer import Tokenizer

T = TypeVar("T")

# Tokenizing this much takes some hundredths of a second: below it, texts are counted and not guessed at (a run of
# unknown characters can be one token, and normalizing can drop characters).
ALWAYS_TOKENIZED = 65_536


class RenderOptions(TypedDict, total=False):
    """What else a chat template is told; absent: as ChatTemplates.render has it."""

    add_generation_prompt: bool
    continue_final_message: bool
    documents: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] | None


class TextTooLong(Exception):
    """A text that cannot fit the context whatever its tokens are; the text of the error is for the client."""

    def __init__(self, characters: int, limit: int) -> None:
        super().__init__(
            f"The prompt has {characters} characters; this server's context (--max-model-len) holds at most {limit}."
        )
        self.characters = characters
        self.limit = limit


class Prompts:
    """Everything that needs the tokenizer or the chat template, off the event loop and one at a time.

    `max_len` is the context in tokens, None as long as the engine has not told it. `chat_template` replaces the
    model's own templates.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_len: int | None = None, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_len = max_len
        templates = tokenizer.templates if chat_template is None else {"default": chat_template}
        self._templates = Renderer(templates, tokenizer.special_tokens)
        # One thread: a burst of long prompts must not take the cores from the engine, and the order of arrival stays.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, tokenizer: Tokenizer, chat_template: Path | None) -> Prompts:
        """Prompts with the template of a file where one is given, compiled; raises ConfigError when it is unusable."""
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
        """What the chat templates say; empty where there is none."""
        return self._templates.source

    @property
    def max_characters(self) -> int:
        """No text longer than this can fit the context."""
        if self.max_len is None:
            return MAX_CHARACTERS
        return min(MAX_CHARACTERS, max(ALWAYS_TOKENIZED, self.max_len * self.tokenizer.longest))

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a plain prompt; raises TextTooLong."""
        self._check(text)
        return await self._run(lambda: self.tokenizer.encode(text, add_special))

    async def echoed(self, text: str, add_special: bool = True) -> tuple[list[int], list[int]]:
        """Token ids of a plain prompt, and where each one's text begins in it, in characters; raises TextTooLong."""
        self._check(text)

        def work() -> tuple[list[int], list[int]]:
            ids, added = self.tokenizer.encode_marked(text, add_special)
            own = text_offsets(self.tokenizer, [i for i, is_added in zip(ids, added, strict=True) if not is_added])
            # A normalizer may have made the tokens' text longer than the prompt's.
            own = [min(offset, len(text)) for offset in own]
            own.append(len(text) if own else 0)
            place, offsets = 0, []
            for is_added in added:
                offsets.append(own[place])
                place += not is_added
            return ids, offsets

        return await self._run(work)

    async def spelt(self, ids: Sequence[int], skip_special: bool = True) -> tuple[str, list[int]]:
        """Text of token ids, and where each one's begins in it, in characters."""
        return await self._run(
            lambda: (self.tokenizer.decode(ids, skip_special), text_offsets(self.tokenizer, ids, skip_special))
        )

    async def spellings(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """How the tokenizer spells each of these words, at the start of a text and behind a space."""

        def work() -> list[tuple[int, ...]]:
            found: list[tuple[int, ...]] = []
            for word in words:
                bare, spaced = (tuple(self.tokenizer.encode(f"{s}{word.lstrip()}", False)) for s in ("", " "))
                # What ends in the first spelling needs no second one.
                found += [each for each in (bare, spaced) if each and (each is bare or each[-len(bare) :] != bare)]
            return list(dict.fromkeys(found))

        return await self._run(work)

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **options: Unpack[RenderOptions]
    ) -> list[int]:
        """Token ids of a conversation; raises TemplateError and TextTooLong."""

        def work() -> list[int]:
            text = self._templates.render(messages, tools, **options)
            self._check(text)
            # The template has written all special tokens itself: adding them would begin the text twice.
            return self.tokenizer.encode(text, add_special=False)

        return await self._run(work)

    async def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, **options: Unpack[RenderOptions]
    ) -> str:
        """The text of a conversation's prompt; raises TemplateError."""
        return await self._run(lambda: self._templates.render(messages, tools, **options))

    async def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids."""
        return await self._run(lambda: self.tokenizer.decode(ids, skip_special))

    async def tokens(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's spelling of each token."""
        return await self._run(lambda: self.tokenizer.tokens(ids))

    def check_template(self) -> None:
        """Compile the chat template, if there is one; raises TemplateError when it is broken."""
        if self._templates:
            self._templates.check()

    def start(self) -> None:
        """Start the process of the chat templates, so that the first chat need not wait for it."""
        self._templates.start()

    def close(self) -> None:
        """Stop the thread and the process; work that has not begun is cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._templates.close()

    def _check(self, text: str) -> None:
        if len(text) > self.max_characters:
            raise TextTooLong(len(text), self.max_characters)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, _guarded, work)


def _guarded(work: Callable[[], T]) -> T:
    """Call `work`, with a RuntimeError for a panic in the tokenizer's library, which is not even an Exception."""
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise RuntimeError(f"the tokenizer failed: {error}") from error
