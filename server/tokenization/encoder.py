"""Prompts to token ids, on threads of their own: one for ordinary texts, one for large ones."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

from engine import ConfigError, FairLock, ModelError, read_text

from ..http import retry
from ..http.errors import unavailable
from .detokenizer import text_offsets
from .generic_tools import renders_tools
from .renderer import MAX_CHARACTERS, SWITCHES, Message, Renderer, TemplateError
from .tokenizer import Tokenizer

T = TypeVar("T")

# Tokenizing this much takes some hundredths of a second: below it, texts are counted and not guessed at (a run of
# unknown characters can be one token, and normalizing can drop characters), and wait for nobody's large ones.
ORDINARY = 65_536
CHARACTERS_PER_TOKEN = 4  # about, in most languages


class RenderOptions(TypedDict, total=False):
    """What else a chat template is told; absent: as ChatTemplates.render has it."""

    add_generation_prompt: bool
    continue_final_message: bool
    documents: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any] | None


class TextTooLong(Exception):
    """A text that cannot fit the context; the text of the error is for the client."""


class NativePanic(Exception):
    """A native library has panicked, which is no Exception by itself and would pass all handlers of those."""


class Stopped(Exception):
    """Nobody waits for this work any more."""


class Lane:
    """A thread that works for callers in turns."""

    def __init__(self, name: str) -> None:
        self._lock = FairLock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, caller: str, work: Callable[[], T]) -> T:
        async with self._lock.turn(caller):
            return await asyncio.get_running_loop().run_in_executor(self._thread, _guarded, work)

    def begin(self, work: Callable[[], object]) -> None:
        """Start work ahead of everything submitted later, and ignore its result."""
        self._thread.submit(work)

    def close(self) -> None:
        """Work that has not begun is cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _guarded(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception:
        raise
    except BaseException as error:
        raise NativePanic(type(error).__name__) from None


class Prompts:
    """Everything that needs the tokenizer or the chat template, off the event loop.

    `max_len` is the context in tokens, None as long as the engine has not told it. `chat_template` replaces the
    model's own templates. `caller` is whose work it is: callers take turns.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_len: int | None = None, chat_template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.max_len = max_len
        templates = tokenizer.templates if chat_template is None else {"default": chat_template}
        # Two threads and no more: a burst of long prompts must not take the cores from the engine. Each has a process
        # for the chat templates; the second one's starts with the first large text.
        self._ordinary, self._large = Lane("tokenizer"), Lane("large texts")
        self._templates, self._large_templates = (Renderer(templates, tokenizer.special_tokens) for _ in range(2))

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
    def takes_effort(self) -> bool:
        """Whether the chat template does anything with how much the model is to think."""
        return any(name in self._templates.source for name in ("reasoning_effort", *SWITCHES))

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template itself writes tools into the prompt; see generic_tools.py."""
        return renders_tools(self._templates.source)

    @property
    def max_characters(self) -> int:
        """No text longer than this can fit the context."""
        if self.max_len is None:
            return MAX_CHARACTERS
        return min(MAX_CHARACTERS, max(ORDINARY, self.max_len * self.tokenizer.longest))

    async def encode(self, text: str, add_special: bool = True, *, caller: str = "", fits: bool = True) -> list[int]:
        """Token ids of a plain prompt; raises TextTooLong. `fits`: it must fit the context, not only its characters."""
        self._check(text)
        stop = threading.Event()
        most = self.max_len if fits else None
        return await self._run(lambda: self._encode(text, add_special, stop, most), len(text), caller, stop)

    async def echoed(self, text: str, add_special: bool = True, *, caller: str = "") -> tuple[list[int], list[int]]:
        """Token ids of a plain prompt, and where each one's text begins in it, in characters; raises TextTooLong."""
        self._check(text)
        stop = threading.Event()

        def work() -> tuple[list[int], list[int]]:
            if len(text) > ORDINARY:
                self._encode(text, add_special, stop, self.max_len)  # in pieces: raises before it is done in one go
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

        return await self._run(work, len(text), caller, stop)

    async def spelt(self, ids: Sequence[int], skip_special: bool = True, *, caller: str = "") -> tuple[str, list[int]]:
        """Text of token ids, and where each one's begins in it, in characters."""
        return await self._run(
            lambda: (self.tokenizer.decode(ids, skip_special), text_offsets(self.tokenizer, ids, skip_special)),
            CHARACTERS_PER_TOKEN * len(ids),
            caller,
        )

    async def spellings(self, words: Sequence[str], *, caller: str = "") -> list[tuple[int, ...]]:
        """How the tokenizer spells each of these words, at the start of a text and after a space."""

        def work() -> list[tuple[int, ...]]:
            found: list[tuple[int, ...]] = []
            for word in words:
                bare, spaced = (tuple(self.tokenizer.encode(f"{s}{word.lstrip()}", False)) for s in ("", " "))
                # What ends in the first spelling needs no second one.
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
        """Token ids of a conversation; raises TemplateError and TextTooLong. `fits`: see encode."""
        stop = threading.Event()
        most = self.max_len if fits else None
        size = characters([messages, tools, options])

        def work() -> list[int]:
            text = self._renderer(size).render(messages, tools, **options)
            self._check(text)
            # The template has written all special tokens itself: adding them would begin the text twice.
            return self._encode(text, False, stop, most)

        return await self._run(work, size, caller, stop)

    async def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        caller: str = "",
        **options: Unpack[RenderOptions],
    ) -> str:
        """The text of a conversation's prompt; raises TemplateError."""
        size = characters([messages, tools, options])
        return await self._run(lambda: self._renderer(size).render(messages, tools, **options), size, caller)

    async def decode(self, ids: Sequence[int], skip_special: bool = True, *, caller: str = "") -> str:
        """Text of token ids."""
        size = CHARACTERS_PER_TOKEN * len(ids)
        return await self._run(lambda: self.tokenizer.decode(ids, skip_special), size, caller)

    async def tokens(self, ids: Sequence[int], *, caller: str = "") -> list[str]:
        """The vocabulary's spelling of each token."""
        return await self._run(lambda: self.tokenizer.tokens(ids), CHARACTERS_PER_TOKEN * len(ids), caller)

    def check_template(self) -> None:
        """Compile the chat template, if there is one; raises TemplateError when it is broken."""
        if self._templates:
            self._templates.check()

    def start(self) -> None:
        """Start the process of the chat templates, so that the first chat need not wait for it."""
        self._ordinary.begin(self._templates.start)

    def close(self) -> None:
        """Stop both threads and the processes; work that has not begun is cancelled."""
        for each in (self._ordinary, self._large, self._templates, self._large_templates):
            each.close()

    def _renderer(self, size: int) -> Renderer:
        """The renderer of the lane that works on texts of this size."""
        return self._templates if size <= ORDINARY else self._large_templates

    def _check(self, text: str) -> None:
        if len(text) > self.max_characters:
            raise TextTooLong(
                f"The prompt has {len(text)} characters; this server's context (--max-model-len) holds at most "
                f"{self.max_characters}."
            )

    def _encode(self, text: str, add_special: bool, stop: threading.Event, most: int | None) -> list[int]:
        """On a lane's thread: the ids of a text. A large one ends with an error when it has more than `most` tokens."""
        if len(text) <= ORDINARY:
            return self.tokenizer.encode(text, add_special)
        ids: list[int] = []
        for piece in self.tokenizer.encode_long(text, add_special):
            ids += piece
            if stop.is_set():
                raise Stopped
            if most is not None and len(ids) > most:
                raise TextTooLong(
                    f"The prompt has more than the {most} tokens that this server's context (--max-model-len) holds."
                )
        return ids

    async def _run(self, work: Callable[[], T], size: int, caller: str, stop: threading.Event | None = None) -> T:
        """Do work on about `size` characters; `stop` is set when nobody waits for it any more. Raises 503."""
        try:
            return await (self._ordinary if size <= ORDINARY else self._large).run(caller, work)
        except OSError:  # the chat template's process cannot be started
            raise unavailable(
                "Texts cannot be prepared at the moment.", "templates_unavailable", retry.TEMPLATES_S
            ) from None
        finally:
            if stop is not None:
                stop.set()


def characters(value: Any) -> int:
    """About how many characters of text there are in a JSON value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + characters(each) for key, each in value.items())
    return sum(map(characters, value)) if isinstance(value, list) else 1
